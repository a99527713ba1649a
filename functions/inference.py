"""The interface through which functions call models; the site implements it.

Inputs, results, errors and events have Workers AI's format.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

from pilotlight.wire.hop.usage import ResourceUse


class EventStream(Protocol):
    """Server-sent events as chunks of bytes. Closing the stream early aborts the generation."""

    @property
    def use(self) -> ResourceUse:
        """The usage so far; it may lag behind."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class InferenceResponse(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""  # JSON: the result or, with a status of 400 or above, Workers AI's errors
    events: EventStream | None = None  # instead of a body
    use: ResourceUse = ResourceUse()  # usage of an answer with a body


class Inference(Protocol):
    def serves(self, model: str) -> bool:
        """Tell whether this site has a model of this name; if so, its usage is counted here."""

    def is_busy(self, model: str) -> bool:
        """Tell whether a request for the model would have to wait or be refused now."""

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        """Run a model on a JSON object for the tenant given by the account and by the key in `headers`.
        Cancelling the task aborts the generation. Refusals are also returned as responses."""

    def own_names(self, model: str) -> tuple[str, str]:
        """Return a model's own name, and the name of the adapter that `model` selects ("" if none)."""

    def models(self, search: str) -> list[dict[str, Any]]:
        """Return the cards of all models whose name contains `search`."""
