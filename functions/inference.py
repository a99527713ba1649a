"""The interface between functions and their site's models, which a site implements.

It takes Workers AI's inputs, and returns results, errors and events.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

from pilotlight.wire.hop.usage import ResourceUse


class EventStream(Protocol):
    """Server-sent events. Closing it, at any time, aborts the generation."""

    @property
    def use(self) -> ResourceUse:
        """Return the usage so far, or less."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class InferenceResponse(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""  # JSON: the result, or Workers AI's envelope of errors if the status is 400 or above
    events: EventStream | None = None  # in place of a body
    use: ResourceUse = ResourceUse()  # of a body


class Inference(Protocol):
    def serves(self, model: str) -> bool:
        """Tell whether this site has a model of this name, and so counts its usage."""

    def is_busy(self, model: str) -> bool:
        """Tell whether a request for the model would have to wait or be refused."""

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        """Answer `inputs`, a JSON object, for the tenant of this account and of the key in `headers`, if any.

        Cancelling it aborts the generation. Refusals are responses too.
        """

    def own_names(self, model: str) -> tuple[str, str]:
        """Return a model's own name, and the name of the requested adapter; empty if there is none."""

    def models(self, search: str) -> list[dict[str, Any]]:
        """The cards of all models whose name contains `search`."""
