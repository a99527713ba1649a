"""Tool calls in the format of Llama 3.1 and 3.2: an answer of JSON objects, with semicolons between.

An object is `{"name": ..., "parameters": {...}}`. Source: Meta's prompt formats of Llama 3.1 and 3.2, "JSON based tool calling". An object that names
no available tool is text, as is any answer that does not start with one. `<|python_tag|>` may precede the first, and Llama 4's `<|python_start|>` and
`<|python_end|>` enclose all.
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
    """Write the grammar of an answer: one that starts with a brace is calls."""
    calls = grammar.calls(rules, lambda name: quoted(f'{{"name": {quoted(name)}, "parameters": '), '"}"')
    call = grammar.rule("call", calls)
    grammar.whole(rules, call if rules.is_single else f"{call} (/; ?/ {call})*", r"/[^{\s](.|\n)*/")
