"""The parts of a dialect that a router needs.

They are a body's fields, a prompt's pieces, and the last event of a stream."""

from collections.abc import Callable, Iterator
from typing import Any

from pilotlight.dialects import anthropic, ollama, openai_responses, prefix_pieces
from pilotlight.wire.errors import Dialect
from pilotlight.wire.sse import Event

Pieces = Callable[[dict[str, Any]], Iterator[tuple[bytes, bool]]]

_PIECES: dict[Dialect, Pieces] = {
    Dialect.ANTHROPIC: anthropic.prompt_pieces,
    Dialect.OPENAI_RESPONSES: openai_responses.prompt_pieces,
    Dialect.OLLAMA: ollama.prompt_pieces,
}
_FINAL_EVENTS = anthropic.FINAL_EVENTS | openai_responses.FINAL_EVENTS


def prompt_pieces(dialect: Dialect, fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the prompt in pieces that a later turn repeats; each says whether it is a conversation's own."""
    if dialect is Dialect.WORKERS_AI and all(fields.get(name) is None for name in ("messages", "prompt")):
        dialect = Dialect.OPENAI_RESPONSES  # the form that `run` accepts, too
    return _PIECES.get(dialect, prefix_pieces.pieces)(fields)


def routing_fields(dialect: Dialect, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body's fields with the names and defaults by which a router reads them."""
    if dialect is Dialect.OLLAMA:
        return ollama.routing_fields(path, fields)
    if fields.get("questions") is not None and fields.get("messages") is None:  # decisions, whose state is their prompt
        state = fields.get("input") if fields.get("state") is None else fields["state"]
        return {**fields, "prompt": state, "input": None}
    return fields


def is_final(event: Event) -> bool:
    """Tell whether an answer has its end with this event."""
    return event.is_done or event.name in _FINAL_EVENTS
