"""The stream of an isolate's response, within the function's limits.

Call `aclose` even if the stream was not read.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Protocol

from pilotlight.functions.channel.failure import ChannelClosed, Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.faults import Fault, fault_of
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.support.time_limits import TimeLimit

BURST_S = 0.004  # the largest burst has the bytes that the rate allows in this time; a larger one would delay all other streams


class StreamingIsolate(Protocol):
    """The part of an isolate that its response streams use."""

    limits: FunctionLimits

    async def sent_chunk(self, size: int, /) -> None:
        """Count a chunk of a stream, and wait until the rate allows the next one."""

    def stream_failed(self, fault: Fault, /) -> None: ...

    async def exit_fault(self) -> Fault:
        """Return why the isolate ended; call this once the channel has closed."""


class ResponseStream:
    def __init__(
        self,
        isolate: StreamingIsolate,
        body: Inbound,
        time_limit: TimeLimit | None,
        on_end: Callable[["ResponseStream"], None],
    ) -> None:
        """`time_limit` is None for a WebSocket's stream, which has no limits of time and size."""
        self._isolate = isolate
        self._body = body
        self._time_limit = time_limit
        self._on_end = on_end
        self._size = 0
        self._is_over = False
        self._why_ended: Fault | None = None
        self.fault: Fault | None = None  # why the stream broke off
        self.is_whole = False  # whether the stream was read to its end

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException as error:
            self.fault = error if isinstance(error, Fault) else None
            self.is_whole = isinstance(error, StopAsyncIteration)
            await self.aclose()
            if self.fault is not None:
                self._isolate.stream_failed(self.fault)
            raise

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._body.cancel()
            self._on_end(self)

    def end(self, why: Fault) -> None:
        """End the stream by the site's decision.
        The reader gets the fault, and the isolate's work is cancelled."""
        self._why_ended = why
        self._body.cancel()

    async def _next(self) -> bytes:
        limits = self._isolate.limits
        try:
            async with self._time_limit or nullcontext():
                chunk = await self._body.__anext__()
        except TimeoutError:
            sentence = f"the function's stream did not end within {limits.wall_s:g} s"
            raise Fault(sentence, code="wall_time") from None
        except ChannelClosed:
            raise await self._isolate.exit_fault() from None
        except Failure as failure:
            raise self._why_ended or fault_of(failure) from None
        self._size += len(chunk)
        await self._isolate.sent_chunk(len(chunk))
        if self._size > limits.response_mib * 2**20 and self._time_limit is not None:
            sentence = f"the response is larger than {limits.response_mib:g} MiB"
            raise Fault(sentence, code="response_too_large")
        return chunk


class StreamThrottle:
    """A rate limit that several streams share, with a short burst; streams above it wait."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_s = per_s
        self._clock, self._sleep = clock, sleep
        self._paid_until = 0.0

    async def take(self, amount: float) -> None:
        now = self._clock()
        self._paid_until = max(now, self._paid_until) + amount / self._per_s
        if self._paid_until - now > BURST_S:
            await self._sleep(self._paid_until - now - BURST_S / 2)
