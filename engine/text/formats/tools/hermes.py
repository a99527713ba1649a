"""Tool calls in the format of Hermes 2 Pro, Qwen 2.5 and 3, and Ember: JSON objects in tags.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

Source: the model card of NousResearch/Hermes-2-Pro, "Prompt Format for Function Calling". If the content of a tag is not a call, tag and content are
text, so that no output of a model is dropped.
"""

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = (OPEN, CLOSE)
FENCES, FENCE_ENDS = ("```json", "```", "<tools>"), ("```", "</tools>")  # of calls without tags
NEWLINE_BRACE = "}\n"  # between a call's arguments and its closing tag


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    yield from _unmarked_calls(s)
    opens, closes = s.markers[OPEN], s.markers[CLOSE]
    while (yield from s.text_until((opens,))) is not None:
        if (yield from values.call(s)):
            yield from s.until((closes, opens), values.drop)
            yield from s.skip(closes)
        else:
            s.unread(opens)


def _unmarked_calls(s: Scanner) -> Reading[None]:
    """Parse calls without the tags at the start of an answer.

    Qwen2.5-Coder writes them as JSON in a code block. Only calls of available tools count, and only where no text precedes them, because elsewhere
    such a block may be an example.
    """
    while True:
        s.hold()
        yield from s.beyond_space()
        yield from s.skip(*FENCES)
        if not (yield from values.call(s, only=s.unmarked)):
            s.unread("")
            return
        yield from s.beyond_space()
        yield from s.skip(*FENCE_ENDS)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar; calls are on separate lines, as in the chat templates."""
    calls = grammar.calls(
        rules, lambda name: quoted('\n{"name": ' + quoted(name) + ', "arguments": '), quoted(NEWLINE_BRACE)
    )
    body = grammar.rule("body", calls)
    grammar.answer(rules, markers, OPEN, f"{body} {markers.lark(CLOSE)}", between=GAP)
