"""Tool calls in the format of Kimi K2: one section of calls, each with an id of function and number.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
<|tool_calls_section_end|>

Source: moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md. Clients get these ids, because the template needs them for the results of the calls.
"""

import re

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TAGS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)

NAME = re.compile(r"[^<\ud800-\udfff]+")


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    section, section_end, call, arguments, call_end = (s.markers[tag] for tag in TAGS)
    while (yield from s.text_until((section,))) is not None:
        before = s.out.num_calls
        while True:
            yield from s.beyond_space()
            if not (yield from s.skip(call)):
                break
            call_id = (yield from s.run(NAME)).strip()
            name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
            if not name or not (yield from s.skip(arguments)) or (yield from s.beyond_space()) != "{":
                break
            s.begin_call(name, call_id)
            yield from values.value(s, s.out.argue)
            s.end_call()
            yield from s.until((call_end, call, section_end), values.drop)
            yield from s.skip(call_end)
        if s.out.num_calls == before or s.was_cut:
            s.unread(section)
        else:
            yield from s.skip(section_end)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar."""
    calls = grammar.calls(
        rules, lambda name: f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {markers.lark(ARGUMENTS)}"
    )
    body = grammar.rule("body", f"{markers.lark(CALL)} ({calls}) {markers.lark(CALL_END)}")
    rest = f"{body if rules.is_single else f'{body}+'} {markers.lark(SECTION_END)}"
    grammar.answer(rules, markers, SECTION, rest)
