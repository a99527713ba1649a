"""Tool calls in the format of Hermes 2 Pro, Qwen 2.5 and 3, and Ember: JSON objects in tags.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

Source: the model card of NousResearch/Hermes-2-Pro, "Prompt Format for Function Calling". If the content of a tag is not a call, tag and content are
text, so that no output of a model is dropped.
"""

import json

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, Calls
from pilotlight.engine.text.formats.scanner import Reading, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = (OPEN, CLOSE)
JSON_BLOCK = "```json"
BLOCKS, BLOCK_ENDS = (JSON_BLOCK, "```", "<tools>"), ("```", "</tools>")  # around calls without tags
NEWLINE_BRACE = "}\n"  # between a call's arguments and its closing tag


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    yield from _unmarked_calls(s)
    s.unread("")
    opens, closes = s.markers[OPEN], s.markers[CLOSE]
    while (marker := (yield from s.text_until((opens, JSON_BLOCK)))) is not None:
        if marker == JSON_BLOCK:
            yield from _json_block(s)
        elif (yield from values.call(s)):
            yield from s.until((closes, opens), values.drop)
            yield from s.skip(closes)
        else:
            s.unread(opens)


def _unmarked_calls(s: Scanner) -> Reading[bool]:
    """Parse calls without the tags, and return whether there are any.

    Qwen2.5-Coder writes them as JSON in a code block. Only calls of available tools count. Text that is no call is still held afterwards.
    """
    has_called = False
    while True:
        s.hold()
        yield from s.beyond_space()
        yield from s.skip(*BLOCKS)
        if not (yield from values.call(s, only=s.unmarked)):
            return has_called
        has_called = True
        yield from s.beyond_space()
        yield from s.skip("}")
        yield from s.beyond_space()
        yield from s.skip(*BLOCK_ENDS)


def _json_block(s: Scanner) -> Reading[None]:
    """Parse a block of JSON that follows text.

    It contains calls if the answer ends with it; else it is text, because it may be an example.
    """
    if (yield from _names_tool(s)):
        s.give_back()
        s.hold()
        s.read(len(JSON_BLOCK))
        while (yield from s.beyond_space()) == "{" and (yield from values.value(s, values.drop)):
            pass
        yield from s.skip(BLOCK_ENDS[0])
        if not (yield from s.beyond_space()) and not s.was_cut:
            s.give_back()
            if (yield from _unmarked_calls(s)):
                s.unread("")
                return
    s.unread(JSON_BLOCK)


def _names_tool(s: Scanner) -> Reading[bool]:
    """Consume the start of an object, and return whether it names an available tool first."""
    yield from s.beyond_space()
    yield from s.skip("{", "{{")
    yield from s.beyond_space()
    if not (yield from s.skip('"name"')):
        return False
    yield from s.beyond_space()
    yield from s.skip(":")
    return ((yield from values.name(s)) or "") in s.unmarked


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar; calls are on separate lines, as in the chat templates."""
    calls = grammar.calls(
        rules, lambda name: quoted('\n{"name": ' + quoted(name) + ', "arguments": '), quoted(NEWLINE_BRACE)
    )
    body = grammar.rule("body", calls)
    grammar.answer(rules, markers, OPEN, f"{body} {markers.lark(CLOSE)}", between=GAP)


def spell(calls: Calls) -> str:
    """Return calls as text, as in the chat templates."""
    written = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"{OPEN}\n{call}\n{CLOSE}" for call in written)
