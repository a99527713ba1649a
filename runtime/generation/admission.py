"""Permits: limits of the requests, and of the tokens, that are in progress at once.

A permit is a scope. It counts its request from the start, and reserves the tokens of the prompt and the expected output once the prompt is known.
Leaving the scope returns both, so after a drain every counter is zero. A request that would exceed a limit is refused at once, with a time after
which to retry. A started request is never aborted in favor of a new one. Independent of HTTP, of engines and of what models' names mean.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from pilotlight.wire.errors import ApiError

RETRY_AFTER_S = 2.0
DRAINING_RETRY_AFTER_S = 5.0
# Limit of a model's reserved tokens, as a multiple of its KV cache. Sequences that do not fit yet wait in the engine until running ones free their
# blocks. Above the limit a new request would wait for several whole generations, and another site is faster.
QUEUED_CACHES = 8


class Admission:
    def __init__(self, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        self.inflight = 0
        self.attached = 0
        self.drains = asyncio.Event()  # set when the drain starts
        self._empty = asyncio.Event()
        self._empty.set()
        self.reserved: dict[str, int] = {}  # reserved tokens by model

    @contextmanager
    def permit(self) -> Iterator["Permit"]:
        if self.draining:
            raise shutting_down()
        if self.inflight >= self.max_inflight:
            message = f"{self.inflight} requests are in progress, which is the limit of this site; try again later"
            raise ApiError("overloaded", message, retry_after_s=RETRY_AFTER_S)
        self.inflight += 1
        self._empty.clear()
        permit = Permit(self)
        try:
            yield permit
        finally:
            if permit.model is not None:
                self.reserved[permit.model] -= permit.tokens
            self.inflight -= 1
            self._look_whether_empty()

    @contextmanager
    def attachment(self) -> Iterator[None]:
        """Count an open WebSocket. It needs no permit, but a drain waits until it closes."""
        self.attached += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.attached -= 1
            self._look_whether_empty()

    @property
    def num_open(self) -> int:
        """Number of requests and WebSockets that a drain waits for."""
        return self.inflight + self.attached

    def _look_whether_empty(self) -> None:
        if not self.num_open:
            self._empty.set()

    @property
    def draining(self) -> bool:
        return self.drains.is_set()

    def drain(self) -> None:
        """Admit no further requests."""
        self.drains.set()

    async def until_draining(self) -> None:
        await self.drains.wait()

    async def wait_until_empty(self) -> None:
        """Wait until no request has a permit and no WebSocket is open."""
        await self._empty.wait()


def shutting_down() -> ApiError:
    """Return the error for a request that has not started; a router then sends it to another site."""
    message = "this site is shutting down; send the request to another site or again later"
    return ApiError("draining", message, retry_after_s=DRAINING_RETRY_AFTER_S)


class Permit(Struct, eq=False):
    """One request's permit. Created only by `Admission.permit`."""

    admission: Admission
    model: str | None = None  # the model whose tokens are reserved
    tokens: int = 0

    def reserve(self, model: str, tokens: int, kv_tokens: int) -> None:
        """Reserve a request's tokens. Raises ApiError if the model's queue would be too long.

        The only request of a model is always accepted; the engine decides whether it fits."""
        assert self.model is None, "a permit reserves once"
        held = self.admission.reserved.get(model, 0)
        if held and held + tokens > QUEUED_CACHES * kv_tokens:
            message = f"{held} tokens are reserved for {model!r}, {QUEUED_CACHES} times its KV cache; try again later"
            raise ApiError("overloaded", message, retry_after_s=RETRY_AFTER_S)
        self.model, self.tokens = model, tokens
        self.admission.reserved[model] = held + tokens
