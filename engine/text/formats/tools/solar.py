"""Answers of Solar Open: messages for reasoning, for tool calls and for the answer.

<|think|>The user wants ...<|end|>
<|begin|>assistant<|tool_calls|>
<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|><|calls|>

Source: the chat template of upstage/Solar-Open-100B, which writes no line ends. The prompt ends with `<|begin|>assistant`, and text follows
`<|content|>`. Clients get the ids of calls, because the template needs them. Every answer has this form, with tools or without.
"""

import re

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import TEXT, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import harmony

BEGIN, END, THINK, CONTENT = "<|begin|>", "<|end|>", "<|think|>", "<|content|>"
CALLS, CALL, NAMED, ARGUMENTS = "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"
CALL_END, CALLS_END = "<|tool_call:end|>", "<|calls|>"
TAGS = (BEGIN, END, THINK, CONTENT, CALLS, CALL, NAMED, ARGUMENTS, CALL_END, CALLS_END)

NAME = re.compile(r"[^<\ud800-\udfff]+")


def read(s: Scanner) -> Reading[None]:
    """Parse messages to the end of the answer."""
    begin, end, *kinds = (s.markers[tag] for tag in TAGS[:5])
    ends, starts = (end, s.markers[CALLS_END]), (begin, *kinds)
    while (yield from s.first()):
        if (yield from s.starts(*starts)) is None:
            yield from harmony.text(s, ends, starts)
            continue
        s.hold()
        kind = yield from s.until(kinds, values.drop)
        yield from s.skip(*kinds)
        s.release()
        if kind == s.markers[CALLS] and s.schemas:
            yield from _calls(s)
        else:
            s.is_reasoning = kind == s.markers[THINK]
            yield from harmony.text(s, ends, starts, is_reasoning=s.is_reasoning)
            s.is_reasoning = False


def _calls(s: Scanner) -> Reading[None]:
    call, named, arguments, call_end, calls_end = (s.markers[tag] for tag in TAGS[5:])
    while (yield from s.beyond_space()) and (yield from s.skip(call)):
        call_id = (yield from s.run(NAME)).strip()
        yield from s.skip(named)
        name = (yield from s.run(NAME)).strip()
        if not name or not (yield from s.skip(arguments)) or (yield from s.beyond_space()) != "{":
            break
        s.begin_call(name, call_id or None)
        yield from values.value(s, s.out.argue)
        s.end_call()
        yield from s.until((call_end, call, calls_end, s.markers[BEGIN]), values.drop)
        yield from s.skip(call_end)
    yield from s.skip(calls_end)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer and its reasoning to the grammar."""
    _, end, think, content, calls, call, named, arguments, call_end, calls_end = map(markers.lark, TAGS)
    thought = grammar.up_to("thought", end, is_token=markers.is_token(END))
    reasoning = grammar.rule("reasoning", f'{think} {thought} {markers.lark(BEGIN)} "assistant"')
    ways = []
    if rules.tools:
        each = grammar.calls(rules, lambda name: f"{named} {quoted(name)} {arguments}", call_end)
        one = grammar.rule("call", f"{call} /[a-z0-9]{{10}}/ ({each})")
        ways.append(f"{calls} {one if rules.is_single else f'{one}+'} {calls_end}")
    if rules.document is not None:
        ways.append(f"{content} {grammar.rule('document', rules.document)} {end}?")
    elif rules.may_be_text:
        ways.append(f"{content} {grammar.rule('text', TEXT)} {end}?")
    grammar.rule("answer", f"{reasoning}* ({' | '.join(ways)})")
