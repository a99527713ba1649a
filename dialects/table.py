"""Parts of a dialect that routers need: a body's fields, a prompt's pieces, a test for the last event."""

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
    """Yield the pieces of a prompt that later turns repeat, and whether each identifies a conversation."""
    if dialect is Dialect.WORKERS_AI and all(fields.get(name) is None for name in ("messages", "prompt")):
        dialect = Dialect.OPENAI_RESPONSES  # `run` accepts this form, too
    return _PIECES.get(dialect, prefix_pieces.pieces)(fields)


def routing_fields(dialect: Dialect, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body's fields with the names and defaults that a router expects."""
    if dialect is Dialect.OLLAMA:
        return ollama.routing_fields(path, fields)
    if fields.get("questions") is not None and fields.get("messages") is None:  # a decision: its state is the prompt
        state = fields.get("input") if fields.get("state") is None else fields["state"]
        return {**fields, "prompt": state, "input": None}
    return fields


def is_final(event: Event) -> bool:
    """Tell whether this event ends an answer."""
    return event.is_done or event.name in _FINAL_EVENTS
