"""Tool calls in the format that Llama 3.2 and 4 may use: a list of Python calls.

For example `[get_weather(city="Paris", days=3), stop()]`. Source: Meta's prompt formats of Llama 3.2 and 4, "Zero shot function calling". A list that
does not start with an available tool is text, as is any answer that does not start with a list. `<|python_start|>` and `<|python_end|>` may enclose
the list.
"""

import json
import re
from typing import Any

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, CallableTool
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools.tagged import fields, kinds_of, listed, properties_of

START, END = "<|python_start|>", "<|python_end|>"
TAGS = (START, END)

_NAME = re.compile(r"[\w.]+")
CALLABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_WORDS = {"boolean": '("True" | "False")', "null": '"None"'}


def read(s: Scanner) -> Reading[None]:
    """Parse an answer that consists of calls, or of text."""
    s.hold()
    yield from s.beyond_space()
    yield from s.skip(s.markers[START])
    if (yield from s.beyond_space()) == "[":
        s.read(1)
        while (yield from _call(s)):
            yield from s.beyond_space()
            if not (yield from s.skip(",")):
                yield from s.skip("]")
                break
            s.hold()
    if not s.out.num_calls:
        s.unread("")
    s.release()
    yield from s.skip(s.markers[END])
    yield from s.text_until(())


def _call(s: Scanner) -> Reading[bool]:
    yield from s.beyond_space()
    name = yield from s.run(_NAME)
    if name not in s.schemas or not (yield from s.skip("(")):
        return False
    s.begin_call(name)
    s.out.argue("{")
    count = 0
    while (first := (yield from s.beyond_space())) and first != ")":
        if first == "," and s.read(1):
            continue
        key = yield from s.run(_NAME)
        yield from s.beyond_space()
        if not key or not (yield from s.skip("=")):
            break
        s.out.argue((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from values.value(s, s.out.argue)):
            break
        count += 1
    is_whole = yield from s.skip(")")
    if is_whole or not s.was_cut:
        s.out.argue("}")
    s.end_call()
    return is_whole


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar; an answer that starts with a bracket consists of calls."""
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = _arguments(grammar, f"argument{number}", tool)
        calls.append(grammar.rule(f"call{number}", f"{quoted(tool.name + '(')} {arguments} {quoted(')')}"))
    call = grammar.rule("call", " | ".join(calls))
    listed = call if rules.is_single else f'{call} (", " {call})*'
    grammar.whole(rules, f'"[" {listed} "]"', r"/[^\[\s](.|\n)*/")


def _arguments(grammar: Grammar, prefix: str, tool: CallableTool) -> str:
    """Add the rules of keyword arguments, in the schema's order, and return the first rule."""
    schema = tool.schema
    properties, required = properties_of(schema), listed(schema.get("required"))
    if not properties:
        if schema.get("additionalProperties") is False:
            return ""
        one = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {grammar.json(f"{prefix}_any", {})}'
        return f'({one} (", " {one})*)?'
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

    def field(number: int, key: str, asked: Any) -> str:
        given = asked if isinstance(asked, dict) else {}
        kinds = kinds_of(given, schema)
        value = _WORDS[next(iter(kinds))] if len(kinds) == 1 and kinds <= _WORDS.keys() and "enum" not in given else ""
        value = value or grammar.json(f"{prefix}_{number}", {**shared, **given}, is_lenient=tool.is_lenient)
        return f"{quoted(key + '=')} {value}"

    return fields(grammar, prefix, properties, required, field, comma=", ")
