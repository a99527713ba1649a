"""Arguments in tags: a value is text if the tool's schema requires a string, and JSON otherwise.

This is the common part of the formats in function_tags.py, glm.py and minimax_m3.py. A closing tag inside a text is text, unless a tag that may come
after a value follows.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, in_slashes, quoted, whole
from pilotlight.engine.text.formats.parts import CallableTool
from pilotlight.engine.text.formats.scanner import Reading, Scanner

MOST_SPACE = 64  # most white space between a closing tag and the tag after it, by which the closing tag is recognised
ANYTHING = r"(?:.|\n)*"
NAME = re.compile(r"[^<>\n\ud800-\udfff]+")
_KINDS = {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "{": "object", "[": "array"}
_REFUSED = ("format", "anyOf", "oneOf", "allOf", "not")


class ValueTags(NamedTuple):
    """The tag that ends a value, and the tags that may follow it."""

    close: str
    padding: str  # text between a value and its tags, on either side
    followers: tuple[str, ...]


def value(s: Scanner, kinds: set[str], tags: ValueTags) -> Reading[None]:
    """Parse an argument's value and its closing tag, and output the value as JSON.

    `kinds`: types that the value may have. A string is output as it arrives, any other value when it is complete.
    """
    if tags.padding:
        yield from s.skip(tags.padding)
    if kinds == {"string"}:
        s.out.argue('"')
        is_whole = yield from _to_end(s, tags, lambda text: s.out.argue(values.escaped(s.markers.as_text(text))))
        if is_whole:
            s.out.argue('"')
        return
    raw: list[str] = []
    s.hold()
    is_whole = yield from _to_end(s, tags, raw.append)
    s.release()
    if is_whole:
        text = s.markers.as_text("".join(raw))
        found = values.as_json(text, s)
        is_other = _KINDS.get(found[0], "number") in kinds | ({"number"} if "integer" in kinds else set())
        is_text = "string" in kinds and not is_other
        s.out.argue(f'"{values.escaped(text)}"' if is_text else found)


def _to_end(s: Scanner, tags: ValueTags, put: values.Put) -> Reading[bool]:
    words = (tags.padding + tags.close, tags.close) if tags.padding else (tags.close,)
    while True:
        word = yield from s.until(words, put)
        if word is None:
            return not s.is_cut
        is_end = yield from _is_followed(s, word, tags.followers)
        text = s.read(len(word))
        if is_end:
            return True
        put(text)


def _is_followed(s: Scanner, word: str, followers: Sequence[str]) -> Reading[bool]:
    while True:
        behind = s.text[len(word) :]
        rest = behind.lstrip()
        if rest.startswith(tuple(followers)):
            return True
        if s.has_ended:
            return not rest or any(each.startswith(rest) for each in followers)
        if (rest and not any(each.startswith(rest) for each in followers)) or len(behind) - len(rest) > MOST_SPACE:
            return False
        yield


def kinds_of_argument(key: str, schema: dict[str, Any]) -> set[str]:
    """Return the types that a tool's schema names for an argument."""
    return kinds_of(properties_of(schema).get(key), schema)


def kinds_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the types that a schema names explicitly."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("$ref"), str):
        return kinds_of(referred(schema, root), {})
    kinds: set[str] = set()
    for part in (*listed(schema.get("anyOf")), *listed(schema.get("oneOf"))):
        kinds |= kinds_of(part, root)
    given = schema.get("type")
    kinds |= {kind for kind in (given, *listed(given)) if isinstance(kind, str)}
    known = [schema["const"]] if "const" in schema else listed(schema.get("enum"))
    return kinds or {"string" if isinstance(each, str) else "object" for each in known}


def referred(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the shared schema that a schema names, or the schema itself; empty if it is not an object."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        *_, group, name = ["", "", *str(schema["$ref"]).split("/")]
        shared = root.get(group)
        schema = shared.get(name) if isinstance(shared, dict) else None
    return schema if isinstance(schema, dict) else {}


def fields(
    grammar: Grammar,
    prefix: str,
    properties: dict[str, Any],
    required: list[Any],
    field: Callable[[int, str, Any], str],
    *,
    comma: str,
) -> str:
    """Add the rules of fields in the given order, with commas between them, and return the first rule.

    `field` returns what matches a field, from its number, key and schema. The first alternative of a rule has its field; the second, for an optional
    one, omits it. Both continue with the next rule.
    """
    last = len(properties)
    for state in ("first", "later"):
        grammar.rule(f"{prefix}_{state}{last}", '""')
    for number, (key, given) in reversed(list(enumerate(properties.items()))):
        written = field(number, key, given)
        for state, before in (("first", ""), ("later", f"{quoted(comma)} ")):
            without = "" if key in required else f" | {prefix}_{state}{number + 1}"
            grammar.rule(f"{prefix}_{state}{number}", f"{before}{written} {prefix}_later{number + 1}{without}")
    return f"{prefix}_first0"


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema's properties; empty if they are invalid."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def listed(value: Any) -> list[Any]:
    """Return a value of a schema if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


class ValueGrammar(NamedTuple):
    """The parts of Lark rules with which a format writes an argument."""

    begin: str  # text before the value; placeholders: KEY, and IS_STRING for true if the value is text or false if it is JSON
    free_begin: str  # text before the value of an argument with any key; empty if there are none
    close: str  # tag that ends the value; placeholder: KEY
    is_token: bool  # whether `close` is a token
    padding: str  # text between a JSON value and `close`
    behind: str  # text between `close` and the next argument


def write(grammar: Grammar, prefix: str, tool: CallableTool, tags: ValueGrammar) -> str:
    """Add the rules of a tool's arguments, in the schema's order, and return a reference to all of them."""
    schema = tool.schema
    properties = properties_of(schema)
    if not properties:
        if schema.get("additionalProperties") is False or not tags.free_begin:
            return ""
        free = grammar.up_to(f"{prefix}_value", tags.close, is_token=tags.is_token)
        return f"({tags.free_begin} {free} {tags.behind})*"
    required = listed(schema.get("required"))
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    arguments = []
    for number, (key, given) in enumerate(properties.items()):
        is_string = "true" if _is_string(given, schema) else "false"
        begin, close = (text.replace("KEY", quoted(key)[1:-1]) for text in (tags.begin, tags.close))
        own = tags._replace(close=close)
        written = _value(grammar, f"{prefix}_{number}", key, given, tool, shared, own)
        argument = f"{begin.replace('IS_STRING', is_string)} {written} {tags.behind}"
        arguments.append(argument if key in required else f"({argument})?")
    return " ".join(arguments)


def _value(
    grammar: Grammar, rule: str, key: str, given: Any, tool: CallableTool, shared: dict[str, Any], tags: ValueGrammar
) -> str:
    root = tool.schema
    padding = f"{quoted(tags.padding)} " if tags.padding else ""
    if not _is_string(given, root):
        schema = {**shared, **given} if isinstance(given, dict) else {}
        return f"{grammar.json(rule, schema, is_lenient=tool.is_lenient)} {padding}{tags.close}"
    return string(grammar, rule, key, referred(given, root), tags.close, is_token=tags.is_token, padding=padding)


def string(
    grammar: Grammar, rule: str, key: str, given: dict[str, Any], close: str, *, is_token: bool, padding: str = ""
) -> str:
    """Add the rules of a string and the tag that ends it, and return what matches both.

    Raises ValueError if the schema cannot be enforced.
    """
    choices = [given["const"]] if "const" in given else listed(given.get("enum"))
    if choices:
        if not all(isinstance(choice, str) for choice in choices):
            raise ValueError(f"the string {key!r} has an enum or const that is not a string")
        return f"({' | '.join(quoted(choice) for choice in choices)}) {padding}{close}"
    if refused := next((name for name in _REFUSED if name in given), None):
        raise ValueError(f"{refused!r} of the string {key!r} cannot be enforced in this model's format of calls")
    if any(name in given for name in ("minLength", "maxLength", "pattern")):
        least, most = whole(given.get("minLength", 0)), whole(given.get("maxLength", ""))
        if type(least) is not int or (most != "" and type(most) is not int):
            raise ValueError(f"minLength and maxLength of {key!r} must be numbers")
        text = f"/[^<]{{{least},{most}}}/"
        if "pattern" in given:
            text = grammar.rule(rule.upper(), f"{text} & {in_slashes(_whole(given['pattern'], key))}")
        return f"{text} {padding}{close}"
    return grammar.up_to(rule, close, is_token=is_token)


def _is_string(given: Any, root: dict[str, Any]) -> bool:
    return isinstance(given, dict) and kinds_of(given, root) == {"string"}


def _whole(pattern: Any, key: str) -> str:
    """Return a schema's pattern, which may match any part of a string, as one that matches whole strings."""
    if not isinstance(pattern, str):
        raise ValueError(f"the pattern of {key!r} is not a string")
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    if (begins or ends) and _has_alternatives(pattern):
        raise ValueError(
            f"the pattern of {key!r} has alternatives with separate anchors: put them in a group, as in ^(a|b)$"
        )
    middle = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else ANYTHING}(?:{middle}){'' if ends else ANYTHING}"


def _has_alternatives(pattern: str) -> bool:
    """Return True if a pattern has alternatives outside of groups."""
    depth = 0
    for sign in re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and not depth:
            return True
    return False
