"""One stream of bytes across a channel, at both ends.

Received bytes wait for their reader; sent bytes wait for credit.

At most a window of bytes is in transit or unread: the reader gives credit as it reads, and a sender that exceeds it breaks the protocol.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

from pilotlight.functions.channel.failure import ChannelClosed, Failure, fail_frame
from pilotlight.functions.channel.frames import AnyFrame, FrameError, More, StreamChunk, StreamEnd

WINDOW_BYTES = 256 << 10  # unread bytes of one stream
CHUNK_BYTES = 64 << 10
JOINED_BYTES = (
    4 << 10
)  # pieces that wait are joined up to this: a window of single bytes took 8 MiB, now it is 128 pieces at most


class StreamChannel(Protocol):
    """The channel of a stream, as the stream uses it."""

    room: asyncio.Event  # the transport takes more
    describe: Callable[[BaseException], Failure]

    def write(self, frame: AnyFrame, /) -> None: ...


class Inbound:
    """An arriving stream: an asynchronous iterator over its bytes, which buffers at most a window."""

    def __init__(self, channel: StreamChannel, id: int, on_cancel: Callable[[], None]) -> None:
        self._channel = channel
        self._id = id
        self._on_cancel = on_cancel
        self._chunks: deque[bytearray] = deque()
        self._held = 0  # bytes sent to us for which no credit was given back
        self._taken = 0  # bytes that the reader has taken
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

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """Read all of it. Raises Failure beyond the limit."""
        parts, size = [], 0
        async for chunk in self:
            parts.append(chunk)
            size += len(chunk)
            if limit_bytes is not None and size > limit_bytes:
                self.cancel()
                raise Failure(f"more than {limit_bytes} bytes", code="body_too_large", status=413)
        return b"".join(parts)

    def cancel(self) -> None:
        """Ask the sender to stop, because nothing more is read. Has no effect after the end."""
        if not self._is_ended:
            self.end(Failure("the stream was cancelled by its reader", code="cancelled", name="AbortError"))
            self._chunks.clear()
            self._on_cancel()

    async def aclose(self) -> None:
        self.cancel()

    def push(self, data: bytes) -> None:
        if not data:  # a million of them would wait here, without using a byte of the window
            raise FrameError("a piece of a stream is empty")
        if self._is_ended:
            return
        self._held += len(data)
        if self._held > WINDOW_BYTES:
            raise FrameError("more was sent of a stream than there was room for")
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
    """The bytes that may be sent of a stream before its reader takes more."""

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
            raise FrameError("credit for more than was sent")
        self._left += size
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def feed(channel: StreamChannel, id: int, body: AsyncIterator[bytes], credit: Credit) -> None:
    """Send a stream as the reader gives credit.
    An exception of the stream ends it at the other side with `fail`."""
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
        with suppress(Exception):  # its reader is gone
            await aclose()
