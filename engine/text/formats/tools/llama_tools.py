"""Tool calls in the format of Llama 3.1 and 3.2: an answer of JSON objects, separated by semicolons.

An object is `{"name": ..., "parameters": {...}}`. Source: Meta's prompt formats of Llama 3.1 and 3.2, "JSON based tool calling". An object that names
no available tool is text, as is any answer that does not start with an object. `<|python_tag|>` may precede the first object, and Llama 4 may enclose
all of them in `<|python_start|>` and `<|python_end|>`.
"""

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner

PYTHON, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TAGS = (PYTHON, START, END)


def read(s: Scanner) -> Reading[None]:
    """Parse an answer that consists of calls, or of text."""
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
    """Add the rules of an answer to the grammar; an answer that starts with a brace consists of calls."""
    calls = grammar.calls(rules, lambda name: quoted(f'{{"name": {quoted(name)}, "parameters": '), '"}"')
    call = grammar.rule("call", calls)
    grammar.whole(rules, call if rules.is_single else f"{call} (/; ?/ {call})*", r"/[^{\s](.|\n)*/")
