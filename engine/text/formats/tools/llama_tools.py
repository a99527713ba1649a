"""Tool calls as Llama 3.1 and 3.2 write them: the answer is nothing but objects `{"name": ..., "parameters": {...}}`, with semicolons between two.

Source: Meta's prompt formats of Llama 3.1 and 3.2, "JSON based tool calling". An object that names none of the tools is text, as any answer is that
does not begin with one. `<|python_tag|>` may stand before the first, and Llama 4's `<|python_start|>` and `<|python_end|>` round all.
"""

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner

PYTHON, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TAGS = (PYTHON, START, END)


def read(s: Scanner) -> Reading[None]:
    """Read an answer that is calls or text."""
    s.hold()
    yield from s.beyond_space()
    yield from s.skip(s.markers[PYTHON], s.markers[START])
    while (yield from values.call(s, only=s.schemas)):
        yield from s.beyond_space()
        yield from s.skip(";", s.markers[END])
        s.hold()
    s.unread("")
    yield from s.text_until(())


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Write the grammar of an answer: one that begins with a brace is calls."""
    calls = []
    for number, tool in enumerate(rules.tools):
        begin = quoted(f'{{"name": {quoted(tool.name)}, "parameters": ')
        calls.append(grammar.rule(f"call{number}", f'{begin} {grammar.arguments(number, tool)} "}}"'))
    call = grammar.rule("call", " | ".join(calls))
    grammar.whole(rules, call if rules.is_single else f"{call} (/; ?/ {call})*", r"/[^{\s](.|\n)*/")
