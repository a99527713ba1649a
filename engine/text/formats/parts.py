"""The parts of an answer (text, reasoning, tool calls with their arguments) and the rules for one."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

Calls = Sequence[tuple[str, dict[str, Any]]]  # names and arguments
Speller = Callable[[Calls], str]  # writes the calls of a message as the model does


class TextPart(NamedTuple):
    """Text that the client sees, as written."""

    text: str


class ReasoningPart(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallPart(NamedTuple):
    """The start of a call."""

    position: int  # index of the call in the answer
    name: str
    id: str | None = None  # the call's id if the format has ids; otherwise the server chooses one


class ArgumentsPart(NamedTuple):
    """A fragment of a call's arguments.

    All fragments of a call form a JSON object, unless the model made an error or was interrupted.
    """

    position: int
    text: str


class CallEndPart(NamedTuple):
    """The end of a call: no further fragment of its arguments follows."""

    position: int


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart | CallEndPart


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join consecutive parts of one kind, so that they are sent together."""
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
    schema: dict[str, Any]  # JSON schema of the arguments
    is_lenient: bool = False  # True if unknown keywords of the schema are ignored, not refused


class AnswerRules(NamedTuple):
    """The required form of an answer after its reasoning: calls, a document, or either."""

    tools: tuple[CallableTool, ...] = ()  # tools that may be called
    is_single: bool = False  # True if at most one call is allowed
    document: str | None = None  # right side of a Lark rule for the document; None if no document is allowed
    may_be_text: bool = False  # True if any text is allowed, also before and between calls


class Thinking(Enum):
    """The state of a model's reasoning at the end of a prompt."""

    OPEN = "open"  # the answer starts inside the reasoning
    MAYBE = "maybe"  # the answer may start with reasoning
    CLOSED = "closed"  # the answer contains no reasoning
