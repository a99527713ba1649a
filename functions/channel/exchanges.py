"""One exchange on a channel, at both ends: a request, its reply, and a stream in each direction.

The initiator waits for a result; at the other end a task answers. A frame that is not allowed in the exchange's state raises FrameError, which closes
the whole channel.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import ChannelClosed, Failure, fail_frame, failure_in
from pilotlight.functions.channel.frames import AnyFrame, Fail, FrameError, More, Reply, StreamChunk, StreamEnd
from pilotlight.functions.channel.streams import Credit, Inbound, StreamChannel, close, feed


class StreamingReply(NamedTuple):
    """A handler's result that has both a value and a stream."""

    value: Any
    body: AsyncIterator[bytes] | None = None


class ExchangeResult(NamedTuple):
    """The result of an exchange, for the side that started it."""

    value: Any
    body: Inbound | None


Handler = Callable[[frames.Request, Inbound | None], Awaitable[Any]]
"""Takes the request and its streamed body, if any; returns a value, a stream of bytes, or a StreamingReply.
An exception is sent as a `Fail` frame."""


class ExchangeChannel(StreamChannel, Protocol):
    """The part of a channel that an exchange uses."""

    def encode(self, frame: AnyFrame, /) -> bytes: ...

    def write_bytes(self, data: bytes, /) -> None: ...

    def hold(self, size: int, /) -> None:
        """Count bytes that stay in memory until `release`. Raises Failure above the limit."""

    def release(self, size: int, /) -> None: ...

    def forget(self, id: int, /) -> bool:
        """Remove a finished exchange; return False if it was removed before."""


class OutgoingExchange:
    """An exchange that this side started."""

    def __init__(self, channel: ExchangeChannel, id: int) -> None:
        self._channel = channel
        self.id = id
        self.result: asyncio.Future[ExchangeResult] = asyncio.get_running_loop().create_future()
        self._credit = Credit()
        self._feeder: asyncio.Future[None] | None = None
        self._body: Inbound | None = None

    def send(self, body: AsyncIterator[bytes]) -> None:
        """Start to send the request's body, at the rate at which the other side reads it."""
        self._feeder = asyncio.ensure_future(feed(self._channel, self.id, body, self._credit))
        self._feeder.add_done_callback(partial(self._sent, body))

    def take(self, frame: AnyFrame) -> None:
        if self.result.cancelled():
            return  # the other side sent the frame before it got the Cancel frame of this exchange
        if isinstance(frame, Reply):
            if self.result.done():
                raise FrameError("a second reply")
            if frame.streamed:
                self._body = Inbound(self._channel, self.id, self._left)
            else:
                self._over()
            self.result.set_result(ExchangeResult(frame.value, self._body))
        elif isinstance(frame, StreamChunk):
            if self._body is None:
                raise FrameError("a chunk of a stream that was not announced")
            self._body.push(frame.data)
        elif isinstance(frame, More):
            self._credit.give(frame.bytes)
        elif isinstance(frame, Fail):
            self.fail(failure_in(frame))
            self._channel.forget(self.id)
        elif isinstance(frame, StreamEnd):
            if self._body is None:
                raise FrameError("the end of a stream that was not announced")
            self._body.end()
            self._over()

    def fail(self, failure: Failure) -> None:
        if not self.result.done():
            self.result.set_exception(failure)
        elif self._body is not None:
            self._body.end(failure)
        self.end()

    def end(self) -> None:
        """Stop sending the body, because the other side no longer reads it."""
        if self._feeder is not None:
            self._feeder.cancel()

    def _sent(self, body: AsyncIterator[bytes], task: "asyncio.Future[None]") -> None:
        """Close a body that `feed` did not close, because its task was cancelled before its first step."""
        ignore_result(task)
        if task.cancelled():
            self._feeder = asyncio.ensure_future(close(body))

    def _over(self) -> None:
        self._channel.forget(self.id)
        self.end()

    def _left(self) -> None:
        if self._channel.forget(self.id):
            self._channel.write(frames.Cancel(self.id))
        self.end()


class IncomingExchange:
    """An exchange started by the other side, and the task that answers it."""

    def __init__(self, channel: ExchangeChannel, frame: frames.Request, size: int, answer: Handler) -> None:
        """Start the task that answers. `size` is the frame's size in bytes, held until the exchange ends."""
        self._channel = channel
        self._id = frame.id
        self._size = size
        streamed = getattr(frame, "streamed", False)
        self._body = Inbound(channel, frame.id, lambda: None) if streamed else None
        self._credit = Credit()
        self._task = asyncio.ensure_future(self._run(frame, answer))
        self._task.add_done_callback(self._over)

    def take(self, frame: AnyFrame) -> None:
        if isinstance(frame, frames.Cancel):
            self.cancel(Failure("the other side left", code="cancelled", name="AbortError"))
        elif isinstance(frame, More):
            self._credit.give(frame.bytes)
        elif isinstance(frame, Reply) or self._body is None:
            raise FrameError("a frame that the initiator of an exchange must not send")
        elif isinstance(frame, StreamChunk):
            self._body.push(frame.data)
        elif isinstance(frame, StreamEnd):
            self._body.end()
        elif isinstance(frame, Fail):
            self._body.end(failure_in(frame))

    def cancel(self, why: Failure) -> None:
        if self._body is not None:
            self._body.end(why)
        self._task.cancel()

    async def _run(self, frame: frames.Request, answer: Handler) -> None:
        channel, body = self._channel, None
        try:
            value, body = _split(await answer(frame, self._body))
            await self._write(channel.encode(Reply(self._id, value, body is not None)))
            if body is not None:
                await feed(channel, self._id, body, self._credit)
        except ChannelClosed:
            return
        except Exception as error:
            await channel.room.wait()
            channel.write(fail_frame(self._id, channel.describe(error)))
        finally:
            if body is not None:
                await close(body)

    async def _write(self, reply: bytes) -> None:
        """Write a reply once the transport has room. Raises Failure if too many bytes are waiting already."""
        channel = self._channel
        if not channel.room.is_set():
            channel.hold(len(reply))
            try:
                while not channel.room.is_set():  # another waiter may have filled the room meanwhile
                    await channel.room.wait()
            finally:
                channel.release(len(reply))
        channel.write_bytes(reply)

    def _over(self, task: "asyncio.Future[None]") -> None:
        """Remove the exchange.
        This is a done callback, because a task that is cancelled before its first step never runs its `finally`."""
        ignore_result(task)
        self._channel.forget(self._id)
        self._channel.release(self._size)
        if self._body is not None:
            self._body.end(Failure("the exchange is over", code="cancelled"))


class OpenExchanges:
    """The open exchanges of a channel: those started by this side and those started by the other.
    One side uses even ids, the other odd ones."""

    def __init__(self, parity: int) -> None:
        """`parity` (0 or 1) is the parity of this side's ids."""
        self.taken: dict[int, IncomingExchange] = {}
        self._started: dict[int, OutgoingExchange] = {}
        self._parity = parity
        self._next_id = parity

    def __len__(self) -> int:
        return len(self._started) + len(self.taken)

    def new_id(self) -> int:
        self._next_id += 2
        return self._next_id - 2

    def is_ours(self, id: int) -> bool:
        return id % 2 == self._parity

    def begin(self, exchange: OutgoingExchange) -> None:
        self._started[exchange.id] = exchange

    def get(self, id: int) -> OutgoingExchange | IncomingExchange | None:
        """Return an open exchange; None if it has ended."""
        return self._started.get(id) if self.is_ours(id) else self.taken.get(id)

    def forget(self, id: int) -> bool:
        """Remove a finished exchange; return False if it was removed before."""
        exchanges: dict[int, OutgoingExchange] | dict[int, IncomingExchange] = (
            self._started if self.is_ours(id) else self.taken
        )
        return exchanges.pop(id, None) is not None

    def fail(self, error: ChannelClosed) -> None:
        """Fail all exchanges with an error."""
        for started in list(self._started.values()):
            started.fail(error)
        self._started.clear()
        for taken in list(self.taken.values()):
            taken.cancel(error)


def _split(answer: Any) -> tuple[Any, AsyncIterator[bytes] | None]:
    if isinstance(answer, StreamingReply):
        return frames.plain(answer.value), answer.body
    if hasattr(answer, "__aiter__"):
        return None, answer
    return frames.plain(answer), None


def ignore_result(task: "asyncio.Future[Any]") -> None:
    """Retrieve a task's exception, already reported, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
