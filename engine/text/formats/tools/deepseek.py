"""Tool calls in the format of DeepSeek V3, R1 and V3.1: one section of calls between marker tokens.

V3 and R1 write each call as `function`, a separator, the name, and the arguments as a fenced block of JSON. V3.1 writes the name, the separator and
the arguments. The parser accepts both forms. Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

import re

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TAGS = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)
FENCE = "```json"

NAME = re.compile(r"[^<`{\n\ud800-\udfff]+")


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    section, section_end, call, separator, call_end = (s.markers[tag] for tag in TAGS)
    while (yield from s.text_until((section,))) is not None:
        before = s.out.num_calls
        while True:
            yield from s.beyond_space()
            if not (yield from s.skip(call)):
                break
            name = (yield from s.run(NAME)).strip()
            if not (yield from s.skip(separator)):
                break
            if (yield from s.beyond_space()) != "{":
                name = (yield from s.run(NAME)).strip()
                yield from s.beyond_space()
                yield from s.skip(FENCE)
            if not name or (yield from s.beyond_space()) != "{":
                break
            s.begin_call(name)
            yield from values.value(s, s.out.argue)
            s.end_call()
            yield from s.until((call_end, call, section_end), values.drop)
            yield from s.skip(call_end)
        if s.out.num_calls == before or s.was_cut:
            s.unread(section)
        else:
            yield from s.skip(section_end)


def write_v3(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer of V3 and R1 to the grammar."""
    begin = f'"function" {markers.lark(SEPARATOR)} NAME {quoted(f"{chr(10)}{FENCE}{chr(10)}")}'
    _write(grammar, rules, markers, begin, quoted("\n```"))


def write_v31(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer of V3.1 to the grammar."""
    _write(grammar, rules, markers, f"NAME {markers.lark(SEPARATOR)}")


def _write(grammar: Grammar, rules: AnswerRules, markers: Markers, begin: str, end: str = "") -> None:
    calls = grammar.calls(rules, lambda name: begin.replace("NAME", quoted(name)), end)
    body = grammar.rule("body", f"{markers.lark(CALL)} ({calls}) {markers.lark(CALL_END)}")
    rest = f"{body if rules.is_single else rf'{body} (/' + chr(92) + f'n?/ {body})*'} {markers.lark(SECTION_END)}"
    grammar.answer(rules, markers, SECTION, rest)
