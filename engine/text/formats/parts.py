"""What an answer is made of: text, reasoning, calls with their arguments; and what it may be asked to be."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple


class TextPart(NamedTuple):
    """Text that the client sees, as it was written."""

    text: str


class ReasoningPart(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallPart(NamedTuple):
    """The beginning of a call."""

    position: int  # among the answer's calls
    name: str
    id: str | None = None  # where the format has one; None: anybody's choice


class ArgumentsPart(NamedTuple):
    """More of a call's arguments. A call's parts together are a JSON object, unless its author broke it or was cut."""

    position: int
    text: str


class CallEndPart(NamedTuple):
    """The end of a call: nothing of it comes after."""

    position: int


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart | CallEndPart


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join neighbours of one kind: what is ready together travels together."""
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
    is_lenient: bool = (
        False  # words of the schema that the grammar library does not know are left out instead of refused
    )


class AnswerRules(NamedTuple):
    """What an answer must be, behind its reasoning: calls, a document, or either."""

    tools: tuple[CallableTool, ...] = ()  # that may be called
    is_single: bool = False  # one call at most
    document: str | None = None  # the only thing there may be beside calls, as the right side of a Lark rule
    may_be_text: bool = False  # any text, before and between calls as well


class Thinking(Enum):
    """Where a prompt leaves the model's reasoning."""

    OPEN = "open"  # the answer begins inside
    MAYBE = "maybe"  # the model may begin it
    CLOSED = "closed"  # there is none
