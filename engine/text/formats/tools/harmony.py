"""Answers of gpt-oss: messages on channels for reasoning, for tool calls and for the answer.

<|channel|>analysis<|message|>The user wants ...<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Source: OpenAI's cookbook, "OpenAI harmony response format". The prompt ends with `<|start|>assistant`. `<|call|>` and `<|return|>` end the answer.
Commentary without a recipient is for the user. Every answer has this form, with tools or without.
"""

import re

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import TEXT, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, ReasoningPart
from pilotlight.engine.text.formats.scanner import Reading, Scanner

START, END, CHANNEL, MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
TAGS = (START, END, CHANNEL, MESSAGE, CONSTRAIN, CALL, RETURN)
FUNCTIONS = "functions."
EFFORTS = ("low", "medium", "high")  # values of "Reasoning: " in the system message; the template would accept any word

NAME = re.compile(r"[^\s<\ud800-\udfff]+")
_RECIPIENT = re.compile(f"to=({NAME.pattern})")


def read(s: Scanner) -> Reading[None]:
    """Parse messages to the end of the answer."""
    start, end, channel, message, _, call, returned = (s.markers[tag] for tag in TAGS)
    ends, starts = (end, call, returned), (start, channel)
    while (yield from s.first()):
        if (yield from s.starts(" to=", "to=", start, channel)) is None:
            yield from text(s, ends, starts)
            continue
        s.hold()
        header: list[str] = []
        yield from s.until((message,), header.append)
        yield from s.skip(message)
        s.release()
        said = "".join(header)
        recipient = _RECIPIENT.search(said)
        if recipient and recipient[1].startswith(FUNCTIONS) and s.schemas and (yield from s.beyond_space()) == "{":
            s.begin_call(recipient[1].removeprefix(FUNCTIONS))
            yield from values.value(s, s.out.argue)
            s.end_call()
            yield from s.until((*ends, *starts), values.drop)
            yield from s.skip(*ends)
        elif recipient or said.partition(channel)[2].strip().startswith("analysis"):
            s.is_reasoning = True
            yield from text(s, ends, starts, is_reasoning=True)
            s.is_reasoning = False
        else:
            yield from text(s, ends, starts)


def text(s: Scanner, ends: tuple[str, ...], starts: tuple[str, ...], *, is_reasoning: bool = False) -> Reading[None]:
    """Parse the text of a message to its end; do not consume a marker that starts another message."""
    ending = yield from s.text_until((*ends, *starts), *((ReasoningPart,) if is_reasoning else ()))
    if ending in ends:
        s.release()
        s.out.drop_space()
    else:
        s.give_back()


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer and its reasoning to the grammar."""
    channel, message, on = markers.lark(CHANNEL), markers.lark(MESSAGE), f'{markers.lark(START)} "assistant"'
    is_token = markers.is_token(END)
    thought = grammar.up_to("thought", markers.lark(END), is_token=is_token)
    reasoning = grammar.rule("reasoning", f'{channel} "analysis" {message} {thought} {on}')
    ways = []
    if rules.tools:

        def begin(name: str) -> str:
            recipient = quoted(f"commentary to={FUNCTIONS}{name} ")
            return f'{channel} {recipient} {markers.lark(CONSTRAIN)} "json" {message}'

        ways.append(grammar.rule("call", grammar.calls(rules, begin)))
    if rules.document is not None:
        ways.append(f'{channel} "final" {message} {grammar.rule("document", rules.document)}')
    elif rules.may_be_text:
        ways.append(f'{channel} ("final" | "commentary") {message} {grammar.rule("text", TEXT)}')
    grammar.rule("answer", f"{reasoning}* ({' | '.join(ways)})")
