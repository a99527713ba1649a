"""Tool calls in the format of Gemma 4, which resembles JSON.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],at:{hour:9}}<tool_call|>

Keys have no quotes, and the quotes of strings are tokens, so that strings need no escapes. Source: the chat template of google/gemma-4-31B-it, which
sorts keys. FunctionGemma's notation has other markers.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted, whole
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, CallableTool
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import tagged

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TAGS = (OPEN, CLOSE, QUOTE)
CALL = "call:"
NAME = re.compile(r"[^{}<>\n\ud800-\udfff]+")

_SCALARS = {"integer", "number", "boolean", "null"}
_UNENFORCED = (
    "allOf",
    "not",
    "uniqueItems",
    "prefixItems",
    "contains",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
)


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    opens, closes, quote = (s.markers[tag] for tag in TAGS)
    while (yield from s.text_until((opens,))) is not None:
        yield from s.beyond_space()
        has_name = yield from s.skip(CALL)
        name = (yield from s.run(NAME)).strip() if has_name else ""
        if not name or (yield from s.first()) != "{":
            s.unread(opens)
            continue
        s.begin_call(name)
        yield from values.value(s, s.out.argue, quote=quote)
        s.end_call()
        yield from s.beyond_space()
        yield from s.skip(closes)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar."""
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = _Arguments(grammar, tool, markers).object(f"argument{number}", tool.schema)
        calls.append(grammar.rule(f"call{number}", f"{quoted(CALL + tool.name)} {arguments}"))
    body = grammar.rule("body", " | ".join(calls))
    grammar.answer(rules, markers, OPEN, f"{body} {markers.lark(CLOSE)}", between='""')


class _Arguments(NamedTuple):
    """The rules of one tool's arguments."""

    grammar: Grammar
    tool: CallableTool
    markers: Markers

    def object(self, rule: str, schema: dict[str, Any]) -> str:
        """Add the rules of an object with the schema's properties, and return what matches it."""
        properties, required = tagged.properties_of(schema), tagged.listed(schema.get("required"))
        if not properties:
            if schema.get("additionalProperties") is False:
                return '"{}"'
            return self._any_object(rule)
        asked = {key: properties[key] for key in sorted(properties, key=str.lower)}
        fields = tagged.fields(self.grammar, rule, asked, required, self._field(rule), comma=",")
        return f'"{{" {fields} "}}"'

    def _field(self, rule: str) -> Callable[[int, str, Any], str]:
        return lambda number, key, given: f"{quoted(key + ':')} {self.value(f'{rule}_{number}', key, given)}"

    def value(self, rule: str, key: str, given: Any) -> str:
        """Add the rules of a value, and return what matches it.

        Raises ValueError if the schema cannot be enforced.
        """
        root = self.tool.schema
        schema = tagged.referred(given, root)
        if refused := next((name for name in _UNENFORCED if name in schema), None):
            raise ValueError(f"{refused!r} of {key!r} cannot be enforced in this model's format of calls")
        choices = [schema["const"]] if "const" in schema else tagged.listed(schema.get("enum"))
        if choices:
            return f"({' | '.join(self._literal(key, choice) for choice in choices)})"
        parts = tagged.listed(schema.get("anyOf")) or tagged.listed(schema.get("oneOf"))
        kinds = sorted(tagged.kinds_of(schema, root))
        if not parts and len(kinds) > 1:
            parts = [{**schema, "type": kind} for kind in kinds]
        if parts:
            return f"({' | '.join(self.value(f'{rule}_{number}', key, part) for number, part in enumerate(parts))})"
        match kinds:
            case ["string"]:
                close, is_token = self.markers.lark(QUOTE), self.markers.is_token(QUOTE)
                return f"{close} {tagged.string(self.grammar, rule, key, schema, close, is_token=is_token)}"
            case [kind] if kind in _SCALARS:
                return self.grammar.json(rule, schema, is_lenient=self.tool.is_lenient)
            case ["object"]:
                return self.grammar.rule(f"{rule}_object", self.object(rule, schema))
            case ["array"]:
                return self._array(rule, key, schema)
        return self._any(f"{rule}_any")

    def _literal(self, key: str, choice: Any) -> str:
        if isinstance(choice, str):
            return f"{self.markers.lark(QUOTE)} {quoted(choice)} {self.markers.lark(QUOTE)}"
        if isinstance(choice, dict | list):
            raise ValueError(
                f"{key!r} has an enum or const that is an object or a list, which cannot be enforced in this model's format of calls"
            )
        return quoted(json.dumps(choice))

    def _array(self, rule: str, key: str, schema: dict[str, Any]) -> str:
        items = schema.get("items")
        item = self.value(f"{rule}_item", key, items) if isinstance(items, dict) else self._any(f"{rule}_any")
        least, most = whole(schema.get("minItems", 0)), whole(schema.get("maxItems", ""))
        if type(least) is not int or (most != "" and type(most) is not int):
            raise ValueError(f"minItems and maxItems of {key!r} must be numbers")
        if most == 0:
            return '"[]"'
        further = f'("," {item}){{{max(0, least - 1)},{most and most - 1}}}'
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _any(self, rule: str) -> str:
        """Add a rule for any value, and return its name."""
        quote = self.markers.lark(QUOTE)
        string = self.grammar.up_to(f"{rule}_text", quote, is_token=self.markers.is_token(QUOTE))
        scalar = self.grammar.json(f"{rule}_scalar", {"type": sorted(_SCALARS)})
        field = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {rule}'
        return self.grammar.rule(
            rule,
            f'{quote} {string} | {scalar} | "[" ({rule} ("," {rule})*)? "]" | "{{" ({field} ("," {field})*)? "}}"',
        )

    def _any_object(self, rule: str) -> str:
        field = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {self._any(f"{rule}_any")}'
        return f'"{{" ({field} ("," {field})*)? "}}"'
