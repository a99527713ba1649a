"""Tool calls as one JSON list between two markers, for several families of models.

<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]</TOOLCALL>

In Apertus' lists, the name is the only key of a call: `{"get_weather": {"city": "Paris"}}`. Sources: the chat templates of
ibm-granite/granite-3.3-2b-instruct, nvidia/NVIDIA-Nemotron-Nano-9B-v2, tencent/Hunyuan-A13B-Instruct (the one in vLLM's examples) and
swiss-ai/Apertus-8B-Instruct-2509. Granite 3.1 may write `<tool_call>` first, as vLLM's parser notes. A marker that no list of calls follows is text.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, Calls
from pilotlight.engine.text.formats.scanner import Reading, Scanner


class ListFormat(NamedTuple):
    opens: tuple[str, ...]  # markers that start a list; grammars use the first
    close: str = ""  # marker that ends a list; empty if there is none
    has_name_key: bool = True  # False if a call's only key is its name

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.opens, self.close) if self.close else self.opens

    def read(self, s: Scanner) -> Reading[None]:
        """Parse text and calls to the end of the answer."""
        opens = tuple(s.markers[tag] for tag in self.opens)
        while (marker := (yield from s.text_until(opens))) is not None:
            before = s.out.num_calls
            yield from s.beyond_space()
            yield from calls(s, values.call if self.has_name_key else _named_call)
            if s.out.num_calls == before or s.was_cut:
                s.unread(marker)
            elif self.close:
                closes = s.markers[self.close]
                yield from s.until((closes, *opens), values.drop)
                yield from s.skip(closes)

    def write(self, grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
        """Add the rules of an answer with one list of calls to the grammar."""
        start = '{"name": NAME, "arguments": ' if self.has_name_key else "{NAME: "
        each = grammar.calls(rules, lambda name: quoted(start.replace("NAME", quoted(name))), '"}"')
        call = grammar.rule("body", each)
        listed = call if rules.is_single else f'{call} (", " {call})*'
        close = f" {markers.lark(self.close)}" if self.close else ""
        grammar.answer(rules, markers, self.opens[0], f'/ ?/ "[" {listed} "]"{close}')

    def spell(self, calls: Calls) -> str:
        """Return calls as text."""
        listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{self.opens[0]}{json.dumps(listed, ensure_ascii=False)}{self.close}"


GRANITE = ListFormat(("<|tool_call|>", "<tool_call>"))
NEMOTRON = ListFormat(("<TOOLCALL>",), "</TOOLCALL>")
HUNYUAN = ListFormat(("<tool_calls>",), "</tool_calls>")
APERTUS = ListFormat(("<|tools_prefix|>",), "<|tools_suffix|>", has_name_key=False)


def calls(s: Scanner, call: Callable[[Scanner], Reading[bool]]) -> Reading[None]:
    """Parse a list of calls, if it comes next."""
    if not (yield from s.skip("[")):
        return
    while (yield from call(s)):
        yield from s.beyond_space()
        if not (yield from s.skip(",")):
            yield from s.skip("]")
            return


def _named_call(s: Scanner) -> Reading[bool]:
    """Parse and output an object whose only key is a tool's name; return False if it is not a call."""
    yield from s.beyond_space()
    if not (yield from s.skip("{")):
        return False
    called = yield from values.name(s)
    yield from s.beyond_space()
    if called is None or not (yield from s.skip(":")) or (yield from s.beyond_space()) != "{":
        return False
    s.begin_call(called)
    yield from values.value(s, s.out.argue)
    s.end_call()
    yield from s.beyond_space()
    return (yield from s.skip("}"))
