"""One stream of bytes across a channel, at both ends.

At most a window of bytes is in transit or unread: the reader grants credit as it reads, the sender waits for credit, and a sender that exceeds it
breaks the protocol.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

from pilotlight.functions.channel.failure import ChannelClosed, Failure, fail_frame
from pilotlight.functions.channel.frames import AnyFrame, FrameError, More, StreamChunk, StreamEnd

WINDOW_BYTES = 256 << 10  # per stream: bytes in transit or unread
CHUNK_BYTES = 64 << 10
JOINED_BYTES = 4 << 10  # unread chunks are joined up to this size, because a window of chunks of one byte took 8 MiB


class StreamChannel(Protocol):
    """The part of a channel that a stream uses."""

    room: asyncio.Event  # set while the transport accepts more bytes
    describe: Callable[[BaseException], Failure]

    def write(self, frame: AnyFrame, /) -> None: ...


class Inbound:
    """An incoming stream: an async iterator over chunks of bytes. Buffers at most a window."""

    def __init__(self, channel: StreamChannel, id: int, on_cancel: Callable[[], None]) -> None:
        self._channel = channel
        self._id = id
        self._on_cancel = on_cancel
        self._chunks: deque[bytearray] = deque()
        self._held = 0  # bytes received for which no credit was granted yet
        self._taken = 0  # bytes consumed by the reader since the last credit
        self._error: Failure | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "Inbound":
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = bytes(self._chunks.popleft())
        self._taken += len(chunk)
        if self._taken >= WINDOW_BYTES // 2 and not self._is_ended:
            self._held -= self._taken
            self._channel.write(More(self._id, self._taken))
            self._taken = 0
        return chunk

    def cancel(self) -> None:
        """Discard the rest and make the sender stop. No effect after the end."""
        if not self._is_ended:
            self.end(Failure("the stream was cancelled by its reader", code="cancelled", name="AbortError"))
            self._chunks.clear()
            self._on_cancel()

    async def aclose(self) -> None:
        self.cancel()

    def push(self, data: bytes) -> None:
        if not data:  # empty chunks use no credit, so a million of them could be queued
            raise FrameError("a chunk of a stream is empty")
        if self._is_ended:
            return
        self._held += len(data)
        if self._held > WINDOW_BYTES:
            raise FrameError("a stream's sender exceeded its credit")
        if self._chunks and len(self._chunks[-1]) + len(data) <= JOINED_BYTES:
            self._chunks[-1] += data
        else:
            self._chunks.append(bytearray(data))
        self._wake()

    def end(self, error: Failure | None = None) -> None:
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Credit:
    """The number of bytes of a stream that may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW_BYTES
        self._waiter: asyncio.Future[None] | None = None

    async def take(self, size: int) -> None:
        while self._left < size:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._left -= size

    def give(self, size: int) -> None:
        if size < 0 or self._left + size > WINDOW_BYTES:
            raise FrameError("credit for more bytes than were sent")
        self._left += size
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def feed(channel: StreamChannel, id: int, body: AsyncIterator[bytes], credit: Credit) -> None:
    """Send a stream at the rate at which the reader grants credit.
    An exception raised by the stream is sent as a `Fail` frame."""
    try:
        async for data in body:
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                await credit.take(len(piece))
                await channel.room.wait()
                channel.write(StreamChunk(id, bytes(piece)))
        channel.write(StreamEnd(id))
    except ChannelClosed:
        return
    except Exception as error:
        channel.write(fail_frame(id, channel.describe(error)))
    finally:
        await close(body)


async def close(body: AsyncIterator[bytes]) -> None:
    if (aclose := getattr(body, "aclose", None)) is not None:
        with suppress(Exception):  # the reader has left, so the error does not matter
            await aclose()
