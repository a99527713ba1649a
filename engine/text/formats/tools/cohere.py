"""Answers of Cohere's Command models: a framed text, or a framed list of calls.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
]<|END_ACTION|>

Command R7B and Command A frame text with `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, later models with `<|START_TEXT|>` and `<|END_TEXT|>`. The ids
are dropped: templates number all calls of a conversation again. Sources: the chat templates of CohereLabs/c4ai-command-r7b-12-2024 and North Mini
Code.
"""

from functools import partial
from typing import NamedTuple

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import TEXT, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import json_lists

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"


class AnswerFrame(NamedTuple):
    """The markers around text."""

    open: str
    close: str

    @property
    def tags(self) -> tuple[str, ...]:
        return (ACTION, ACTION_END, *self)


RESPONSE, SPOKEN = AnswerFrame("<|START_RESPONSE|>", "<|END_RESPONSE|>"), AnswerFrame("<|START_TEXT|>", "<|END_TEXT|>")


def read(s: Scanner, frame: AnswerFrame) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    action, action_end, opens, closes = (s.markers[tag] for tag in frame.tags)
    words = (opens, closes, action) if s.schemas else (opens, closes)
    while (word := (yield from s.text_until(words))) is not None:
        if word != action:
            s.release()
            s.out.drop_space()
            continue
        before = s.out.num_calls
        yield from s.beyond_space()
        yield from json_lists.calls(s, partial(values.call, name_key="tool_name"))
        if s.out.num_calls == before or s.was_cut:
            s.unread(action)
        else:
            yield from s.until((action_end, opens, action), values.drop)
            yield from s.skip(action_end)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers, frame: AnswerFrame) -> None:
    """Add the rules of an answer to the grammar."""
    opens, closes = (f"({markers.lark(tag)})?" for tag in frame)
    if rules.document is not None:
        rules = rules._replace(document=f"{opens} {grammar.rule('framed', rules.document)} {closes}")
    if not rules.tools:
        grammar.rule("answer", rules.document or TEXT)
        return
    calls = grammar.calls(rules, _begin, '"}"')
    call = grammar.rule("call", calls)
    more = "" if rules.is_single else f"({quoted(f',{chr(10)}    ')} {call})*"
    rest = f"{quoted('[' + chr(10) + '    ')} {call} {more} {quoted(chr(10) + ']')} {markers.lark(ACTION_END)}"
    if rules.document is None and rules.may_be_text and markers.is_token(ACTION):
        text = grammar.rule("text", TEXT)
        grammar.rule("answer", f"{opens} {text} {closes} ({markers.lark(ACTION)} {rest})?")
    else:
        grammar.answer(rules, markers, ACTION, rest)


def _begin(name: str) -> str:
    before, behind = '{"tool_call_id": "', f'", "tool_name": {quoted(name)}, "parameters": '
    return f"{quoted(before)} /[0-9]{{1,3}}/ {quoted(behind)}"
