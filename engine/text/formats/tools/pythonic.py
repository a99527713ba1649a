"""Tool calls as Python calls, in the formats of Llama 3.2 and 4, LFM2 and Olmo 3.

For example `[get_weather(city="Paris", days=3), stop()]`. Source: Meta's prompt formats of Llama 3.2 and 4, "Zero shot function calling". A list that
does not start with an available tool is text, as is any answer that does not start with a list. `<|python_start|>` and `<|python_end|>` may enclose
the list. LFM2 and Olmo 3 always enclose their calls in markers, so text may precede them; Olmo 3 writes one call per line, without brackets.
Sources: the chat templates of LiquidAI/LFM2.5-8B-A1B and allenai/Olmo-3.1-32B-Instruct.
"""

import json
import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, CallableTool, Calls
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools.tagged import fields, kinds_of, listed, properties_of

START, END = "<|python_start|>", "<|python_end|>"
TAGS = (START, END)

NAME = re.compile(r"[\w.-]+")
CALLABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_WORDS = {"boolean": '("True" | "False")', "null": '"None"'}


def read(s: Scanner) -> Reading[None]:
    """Parse an answer that consists of calls, or of text."""
    s.hold()
    yield from s.beyond_space()
    yield from s.skip(s.markers[START])
    if (yield from s.beyond_space()) == "[":
        s.read(1)
        yield from _calls(s, s.schemas)
        yield from s.skip("]")
    if not s.out.num_calls:
        s.unread("")
    s.release()
    yield from s.skip(s.markers[END])
    yield from s.text_until(())


class MarkedFormat(NamedTuple):
    """A format whose calls are between two markers."""

    open: str
    close: str
    is_list: bool  # True for a list in brackets, False for a call on each line
    words: Mapping[str, str]  # rules of the types whose values are not JSON

    @property
    def tags(self) -> tuple[str, str]:
        return (self.open, self.close)

    def read(self, s: Scanner) -> Reading[None]:
        """Parse text and calls to the end of the answer."""
        opens, closes = s.markers[self.open], s.markers[self.close]
        while (yield from s.text_until((opens,))) is not None:
            before = s.out.num_calls
            yield from s.beyond_space()
            if not self.is_list or (yield from s.skip("[")):
                yield from _calls(s, None, "," if self.is_list else "")
            if s.out.num_calls == before or s.was_cut:
                s.unread(opens)
                continue
            s.release()
            yield from s.until((closes, opens), values.drop)
            yield from s.skip(closes)

    def write(self, grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
        """Add the rules of an answer to the grammar."""
        call = _write(grammar, rules, self.words)
        between = quoted(", " if self.is_list else "\n")
        listed = call if rules.is_single else f"{call} ({between} {call})*"
        body = f'"[" {listed} "]"' if self.is_list else rf"/\n?/ {listed} /\n?/"
        grammar.answer(rules, markers, self.open, f"{body} {markers.lark(self.close)}")

    def spell(self, calls: Calls) -> str:
        """Return calls as text."""
        listed = [f"{name}({', '.join(map(self._argument, arguments.items()))})" for name, arguments in calls]
        return self.open + (f"[{', '.join(listed)}]" if self.is_list else "\n".join(listed)) + self.close

    def _argument(self, item: tuple[str, Any]) -> str:
        key, value = item
        is_word = self.words and (value is None or isinstance(value, bool))
        return f"{key}={value if is_word else json.dumps(value, ensure_ascii=False)}"


LFM2 = MarkedFormat("<|tool_call_start|>", "<|tool_call_end|>", is_list=True, words=_WORDS)
OLMO3 = MarkedFormat("<function_calls>", "</function_calls>", is_list=False, words={})


def _calls(s: Scanner, known: Container[str] | None, comma: str = ",") -> Reading[None]:
    """Parse calls up to the first text that is not a call.

    `known`: names of tools that can be called, or None for any.
    """
    while (yield from _call(s, known)):
        yield from s.beyond_space()
        if comma and not (yield from s.skip(comma)):
            return
        s.hold()


def _call(s: Scanner, known: Container[str] | None) -> Reading[bool]:
    yield from s.beyond_space()
    name = yield from s.run(NAME)
    if not name or (known is not None and name not in known) or not (yield from s.skip("(")):
        return False
    s.begin_call(name)
    s.out.argue("{")
    count = 0
    while (first := (yield from s.beyond_space())) and first != ")":
        if first == "," and s.read(1):
            continue
        key = yield from s.run(NAME)
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
    call = _write(grammar, rules, _WORDS)
    listed = call if rules.is_single else f'{call} (", " {call})*'
    grammar.whole(rules, f'"[" {listed} "]"', r"/[^\[\s](.|\n)*/")


def _write(grammar: Grammar, rules: AnswerRules, words: Mapping[str, str]) -> str:
    """Add the rules of calls of all tools to the grammar, and return the rule of one call."""
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = _arguments(grammar, f"argument{number}", tool, words)
        calls.append(grammar.rule(f"call{number}", f"{quoted(tool.name + '(')} {arguments} {quoted(')')}"))
    return grammar.rule("call", " | ".join(calls))


def _arguments(grammar: Grammar, prefix: str, tool: CallableTool, words: Mapping[str, str]) -> str:
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
        value = words[next(iter(kinds))] if len(kinds) == 1 and kinds <= words.keys() and "enum" not in given else ""
        value = value or grammar.json(f"{prefix}_{number}", {**shared, **given}, is_lenient=tool.is_lenient)
        return f"{quoted(key + '=')} {value}"

    return fields(grammar, prefix, properties, required, field, comma=", ")
