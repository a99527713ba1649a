"""One exchange on a channel, at both ends: a request, its reply, and streams in both directions.

The initiator waits for a result; at the other end a task answers. A frame that is not allowed at this point is a FrameError, which ends the whole
channel.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import ChannelClosed, Failure, fail_frame
from pilotlight.functions.channel.frames import AnyFrame, Fail, FrameError, More, Reply, StreamChunk, StreamEnd
from pilotlight.functions.channel.streams import Credit, Inbound, StreamChannel, close, feed


class StreamingReply(NamedTuple):
    """The result of a handler that returns a value with a stream."""

    value: Any
    body: AsyncIterator[bytes] | None = None


class ExchangeResult(NamedTuple):
    """The result of an exchange at its initiator."""

    value: Any
    body: Inbound | None


Handler = Callable[[frames.Request, Inbound | None], Awaitable[Any]]
"""Takes the request and its streamed body, if any; returns a value, a stream of bytes, or an Answer. An exception becomes a `fail` frame."""


class ExchangeChannel(StreamChannel, Protocol):
    """The channel of an exchange, as the exchange uses it."""

    def encode(self, frame: AnyFrame, /) -> bytes: ...

    def write_bytes(self, data: bytes, /) -> None: ...

    def hold(self, size: int, /) -> None:
        """Count bytes that stay in memory until `release`. Raises Failure beyond the bound."""

    def release(self, size: int, /) -> None: ...

    def forget(self, id: int, /) -> bool:
        """Drop a finished exchange. False: it was dropped before."""


class OutgoingExchange:
    """An exchange that this side began."""

    def __init__(self, channel: ExchangeChannel, id: int) -> None:
        self._channel = channel
        self.id = id
        self.result: asyncio.Future[ExchangeResult] = asyncio.get_running_loop().create_future()
        self._credit = Credit()
        self._feeder: asyncio.Future[None] | None = None
        self._body: Inbound | None = None

    def send(self, body: AsyncIterator[bytes]) -> None:
        """Send the request's body, as the other side takes it."""
        self._feeder = asyncio.ensure_future(feed(self._channel, self.id, body, self._credit))
        self._feeder.add_done_callback(ignore_result)

    def take(self, frame: AnyFrame) -> None:
        if self.result.cancelled():
            return  # its initiator is leaving and reports it when its task runs next; this frame came in between
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
                raise FrameError("a piece of a stream that was not announced")
            self._body.push(frame.data)
        elif isinstance(frame, More):
            self._credit.give(frame.bytes)
        elif isinstance(frame, Fail):
            failure = Failure(
                frame.message,
                code=frame.code,
                status=frame.status,
                name=frame.name,
                detail=frame.detail,
                value=frame.value,
            )
            self.fail(failure)
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
        """Stop sending the body, which the other side reads no more."""
        if self._feeder is not None:
            self._feeder.cancel()

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
        """`size`: the frame's, in bytes that the channel holds until the exchange is over."""
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
            raise FrameError("a frame that only the other side may send")
        elif isinstance(frame, StreamChunk):
            self._body.push(frame.data)
        elif isinstance(frame, StreamEnd):
            self._body.end()
        elif isinstance(frame, Fail):
            self._body.end(Failure(frame.message, code=frame.code, status=frame.status, name=frame.name))

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
        """Write a reply once there is room. Raises Failure if too many bytes wait for that already."""
        channel = self._channel
        if not channel.room.is_set():
            channel.hold(len(reply))
            try:
                while not channel.room.is_set():  # the first waiter that is woken may fill the room again
                    await channel.room.wait()
            finally:
                channel.release(len(reply))
        channel.write_bytes(reply)

    def _over(self, task: "asyncio.Future[None]") -> None:
        """Drop the exchange.

        Also called if the task was cancelled before its first step, when its `finally` never ran.
        """
        ignore_result(task)
        self._channel.forget(self._id)
        self._channel.release(self._size)
        if self._body is not None:
            self._body.end(Failure("the exchange is over", code="cancelled"))


def _split(answer: Any) -> tuple[Any, AsyncIterator[bytes] | None]:
    if isinstance(answer, StreamingReply):
        return frames.plain(answer.value), answer.body
    if hasattr(answer, "__aiter__"):
        return None, answer
    return frames.plain(answer), None


def ignore_result(task: "asyncio.Future[Any]") -> None:
    """Retrieve a task's exception, so that asyncio does not log it: it has been reported already."""
    if not task.cancelled():
        task.exception()
