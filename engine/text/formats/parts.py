"""The parts of an answer: text, reasoning, calls with their arguments; and the rules for an answer."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple


class TextPart(NamedTuple):
    """Text that the client sees, as written."""

    text: str


class ReasoningPart(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallPart(NamedTuple):
    """The start of a call."""

    position: int  # among the answer's calls
    name: str
    id: str | None = None  # if the format has one; else the reader may choose any


class ArgumentsPart(NamedTuple):
    """More of a call's arguments.

    A call's parts together are a JSON object, unless the model made an error or was interrupted.
    """

    position: int
    text: str


class CallEndPart(NamedTuple):
    """The end of a call: no further part of it follows."""

    position: int


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart | CallEndPart


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join neighbours of one kind, so that they are sent together."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            found[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            found[-1] = ReasoningPart(last.text + part.text)
        elif isinstance(part, ArgumentsPart) and isinstance(last, ArgumentsPart) and part.position == last.position:
            found[-1] = ArgumentsPart(last.position, last.text + part.text)
        else:
            found.append(part)
    return tuple(found)


class CallableTool(NamedTuple):
    name: str
    schema: dict[str, Any]  # of its arguments
    is_lenient: bool = False  # unknown words of the schema are ignored instead of refused


class AnswerRules(NamedTuple):
    """The required form of an answer after its reasoning: calls, a document, or either."""

    tools: tuple[CallableTool, ...] = ()  # tools that may be called
    is_single: bool = False  # at most one call
    document: str | None = None  # the only alternative to calls, as the right side of a Lark rule
    may_be_text: bool = False  # any text, also before and between calls


class Thinking(Enum):
    """The state of a model's reasoning at the end of a prompt."""

    OPEN = "open"  # the answer starts inside the reasoning
    MAYBE = "maybe"  # the model may start it
    CLOSED = "closed"  # there is none
