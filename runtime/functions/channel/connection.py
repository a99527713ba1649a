"""Channel: many exchanges over one socket, each a request, its reply, and a stream in either direction.

The same class serves both ends, the runtime's and an isolate's. Buffers are bounded: a stream's sender waits for credit, a reader gives it as it
takes, and who sends beyond its credit is cut off. An exchange that its beginner leaves is cancelled at the other end. Both processes import this
module, so it knows asyncio and runtime/functions/frames.py, and neither bindings nor processes.
"""

import asyncio
import contextvars
import select
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

from runtime.functions import frames
from runtime.functions.frames import AnyFrame, Call, Chunk, End, Fail, FrameDecoder, FrameError, More, Note, Reply

MAX_FRAME_BYTES = 32 << 20  # a KV value of 25 MiB, and what is around it
WINDOW_BYTES = 256 << 10  # of one stream on its way
CHUNK_BYTES = 64 << 10
MAX_OPEN = 1024  # exchanges the other side may have begun here at once

_WITHIN = (Chunk, End, More, Fail, Reply, frames.Cancel)  # of an exchange that is open

current_request: contextvars.ContextVar[int] = contextvars.ContextVar("current_request", default=-1)


class Failure(Exception):
    """An exchange failed at the other end, or should fail there: what is said of it."""

    def __init__(
        self,
        message: str,
        *,
        code: str | int = "internal_error",
        status: int = 500,
        name: str = "Error",
        detail: str = "",
        retry_after_s: int = 1,
    ) -> None:
        """`retry_after_s` is for callers of a function, where the status is 503."""
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.name = name
        self.detail = detail
        self.retry_after_s = retry_after_s


class ChannelClosed(Failure):
    """The other side is gone."""

    def __init__(self, message: str = "the connection to the other process is closed") -> None:
        super().__init__(message, code="closed", name="ChannelClosed")


class Answer(NamedTuple):
    """What a handler gives back when it is a value with a stream behind it. A plain value, or a stream alone, may be given back as they are."""

    value: Any
    body: AsyncIterator[bytes] | None = None


class Result(NamedTuple):
    """What the beginner of an exchange gets."""

    value: Any
    body: "Inbound | None"


Handler = Callable[[frames.Request, "Inbound | None"], Awaitable[Any]]
"""Gets the request and its body where one is streamed; gives back a value, a stream of bytes, or an Answer. What it raises becomes a `fail`."""


def as_failure(error: BaseException) -> Failure:
    if isinstance(error, Failure):
        return error
    code, status = getattr(error, "code", "internal_error"), getattr(error, "status", 500)
    return Failure(
        str(error) or type(error).__name__,
        code=code if isinstance(code, (str, int)) else "internal_error",
        status=status if isinstance(status, int) else 500,
        name=type(error).__name__,
    )


class Channel(asyncio.Protocol):
    def __init__(
        self,
        answer: Handler,
        *,
        is_runtime: bool,
        describe: Callable[[BaseException], Failure] = as_failure,
        on_note: Callable[[Note], None] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._answer = answer
        self._describe = describe
        self._on_note = on_note
        self._max_frame_bytes = max_frame_bytes
        self._max_open = max_open
        self._parity = 0 if is_runtime else 1
        self._next_id = self._parity
        self._decoder = FrameDecoder(max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._sent: dict[int, _Sent] = {}
        self._taken: dict[int, _Taken] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._room.set()
        self.closed = asyncio.Event()
        self.why_closed = ""

    @classmethod
    async def open(cls, sock: socket.socket, answer: Handler, *, is_runtime: bool, **options: Any) -> "Channel":
        """Takes the socket over."""
        channel = cls(answer, is_runtime=is_runtime, **options)
        sock.setblocking(False)
        channel._socket = sock
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return channel

    # -- beginning an exchange --------------------------------------------------------------------------------------------------

    async def call(self, binding: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """A binding's method. A stream that it answers with is dropped: ask `stream` or `begin` for those."""
        result = await self.begin(binding, method, args, kwargs)
        if result.body is not None:
            result.body.cancel()
        return result.value

    async def begin(
        self,
        binding: str,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        body: AsyncIterator[bytes] | None = None,
    ) -> Result:
        """A binding's method with a body sent along, or whose answer is a value and a stream."""
        sent_args, sent_kwargs = frames.plain(list(args), f"{method}'s arguments"), frames.plain(kwargs or {}, method)
        within = current_request.get()

        def call(id: int) -> Call:
            return Call(id, binding, method, sent_args, sent_kwargs, body is not None, within)

        return await self.request(call, body)

    def call_now(self, binding: str, method: str, **kwargs: Any) -> Any:
        """A binding's method for code that cannot await: the event loop stands still until the answer is here.

        What else arrives meanwhile is taken as usual, pings too, and waits for the loop. Counts as part of no request.
        """
        if self.closed.is_set():
            raise ChannelClosed(self.why_closed or "the connection to the other process is closed")
        id = self._next_id
        self._next_id += 2
        first = frames.encode(Call(id, binding, method, [], frames.plain(kwargs, method)), self._max_frame_bytes)
        sent = self._sent[id] = _Sent(self, id)
        self._write_raw(first)
        try:
            self._exchange_until(sent.result)
            result = sent.result.result()
        finally:
            self._sent.pop(id, None)
            sent.end()
        if result.body is not None:
            result.body.cancel()
        return result.value

    def _exchange_until(self, result: "asyncio.Future[Result]") -> None:
        """What the loop does for this socket, done here: asyncio's own transport keeps what it has yet to send, and sends it first."""
        assert self._transport is not None
        assert self._socket is not None
        transport, poll = self._transport, select.poll()
        while not result.done():
            if transport.is_closing():
                raise ChannelClosed(self.why_closed or "the connection to the other process is closed")
            is_waiting = transport.get_write_buffer_size() > 0
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if is_waiting else 0))
            events = poll.poll()[0][1]
            if events & select.POLLOUT and is_waiting:
                transport._write_ready()  # type: ignore[attr-defined]  # selector transports have it in 3.11 to 3.14
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive_now()

    def _receive_now(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(WINDOW_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"the connection to the other process broke: {error}") from None
        if not data:
            raise ChannelClosed("the other process closed the connection")
        self.data_received(data)

    async def stream(self, binding: str, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        """A binding's method that answers with a stream. Leaving the loop early cancels it at the other end (with `aclosing`, at once)."""
        result = await self.begin(binding, method, args, kwargs)
        if result.body is None:
            raise Failure(f"{binding}.{method} answered with a value and not with a stream", name="TypeError")
        try:
            async for chunk in result.body:
                yield chunk
        finally:
            result.body.cancel()

    async def request(self, frame: Callable[[int], frames.Request], body: AsyncIterator[bytes] | None = None) -> Result:
        """Any exchange: `frame` makes the first message from the id. Cancelling this cancels it at the other end. Raises Failure."""
        if self.closed.is_set():
            raise ChannelClosed(self.why_closed or "the connection to the other process is closed")
        id = self._next_id
        self._next_id += 2
        first = frames.encode(frame(id), self._max_frame_bytes)
        sent = self._sent[id] = _Sent(self, id)
        self._write_raw(first)
        if body is not None:
            sent.feeder = asyncio.ensure_future(self._feed(id, body, sent.credit))
            sent.feeder.add_done_callback(_look_away)
        try:
            return await sent.result
        except BaseException:
            if self._sent.pop(id, None) is not None:
                self._write(frames.Cancel(id))
            sent.end()
            raise

    def note(self, name: str, value: Any = None) -> None:
        self._write(Note(0, name, value))

    async def ping(self) -> None:
        """Returns when the other side's event loop has answered."""
        if self.closed.is_set():
            raise ChannelClosed(self.why_closed)
        id = self._next_id
        self._next_id += 2
        self._pings[id] = asyncio.get_running_loop().create_future()
        self._write(frames.Ping(id))
        try:
            await self._pings[id]
        finally:
            self._pings.pop(id, None)

    def close(self, why: str = "") -> None:
        """At once; everything under way fails at both ends."""
        self.why_closed = self.why_closed or why
        if self._transport is not None:
            self._transport.abort()

    @property
    def num_open(self) -> int:
        """Exchanges begun at either side."""
        return len(self._sent) + len(self._taken)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WINDOW_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
        except FrameError as error:
            self.close(f"the other process broke the protocol: {error}")

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._room.set()
        gone = ChannelClosed(self.why_closed or "the other process closed the connection")
        for sent in list(self._sent.values()):
            sent.fail(gone)
        self._sent.clear()
        for taken in list(self._taken.values()):
            taken.cancel(gone)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(gone)

    # -- frames -------------------------------------------------------------------------------------------------------------------

    def _take(self, frame: AnyFrame) -> None:
        if isinstance(frame, _WITHIN):
            is_ours = frame.id % 2 == self._parity
            exchange = self._sent.get(frame.id) if is_ours else self._taken.get(frame.id)
            if exchange is not None:  # else it is over here, and the other side did not know yet
                exchange.take(frame)
        elif isinstance(frame, frames.Ping):
            if self._room.is_set():  # who does not read its answers gets none
                self._write(frames.Pong(frame.id))
        elif isinstance(frame, frames.Pong):
            if (ping := self._pings.get(frame.id)) is not None and not ping.done():
                ping.set_result(None)
        elif isinstance(frame, Note):
            if self._on_note is not None:
                self._on_note(frame)
        else:
            self._begin(frame)

    def _begin(self, frame: frames.Request) -> None:
        if frame.id % 2 == self._parity or frame.id in self._taken:
            raise FrameError(f"the id {frame.id} cannot begin an exchange")
        if len(self._taken) >= self._max_open:
            sentence = f"{self._max_open} exchanges are open already; wait for some of them"
            self._write(Fail(frame.id, "too_many_open", 429, sentence))
            return
        self._taken[frame.id] = _Taken(self, frame)

    async def _feed(self, id: int, body: AsyncIterator[bytes], credit: "_Credit") -> None:
        """Sends a stream as the reader has room. What the stream raises ends it at the other side, too, with `fail`."""
        try:
            async for data in body:
                for start in range(0, len(data), CHUNK_BYTES):
                    piece = data[start : start + CHUNK_BYTES]
                    await credit.take(len(piece))
                    await self._room.wait()
                    self._write(Chunk(id, bytes(piece)))
            self._write(End(id))
        except ChannelClosed:
            return
        except Exception as error:
            self._write(_fail(id, self._describe(error)))
        finally:
            await _close(body)

    def _write(self, frame: AnyFrame) -> None:
        self._write_raw(frames.encode(frame, self._max_frame_bytes))

    def _write_raw(self, data: bytes) -> None:
        if self._transport is not None and not self.closed.is_set():
            self._transport.write(data)


class Inbound:
    """A stream that arrives: an asynchronous iterator over its bytes, at most a window of them waiting here."""

    def __init__(self, channel: Channel, id: int, on_cancel: Callable[[], None]) -> None:
        self._channel = channel
        self._id = id
        self._on_cancel = on_cancel
        self._chunks: deque[bytes] = deque()
        self._held = 0  # bytes sent to us for which no credit was given back
        self._taken = 0  # of these, what the reader has
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
        chunk = self._chunks.popleft()
        self._taken += len(chunk)
        if self._taken >= WINDOW_BYTES // 2 and not self._is_ended:
            self._held -= self._taken
            self._channel._write(More(self._id, self._taken))
            self._taken = 0
        return chunk

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """All of it. Raises Failure beyond the limit."""
        parts, size = [], 0
        async for chunk in self:
            parts.append(chunk)
            size += len(chunk)
            if limit_bytes is not None and size > limit_bytes:
                self.cancel()
                raise Failure(f"more than {limit_bytes} bytes", code="body_too_large", status=413)
        return b"".join(parts)

    def cancel(self) -> None:
        """The reader wants no more. Nothing happens after the end."""
        if not self._is_ended:
            self.end(Failure("the stream was cancelled by its reader", code="cancelled", name="AbortError"))
            self._chunks.clear()
            self._on_cancel()

    async def aclose(self) -> None:
        self.cancel()

    def push(self, data: bytes) -> None:
        if self._is_ended:
            return
        self._held += len(data)
        if self._held > WINDOW_BYTES:
            raise FrameError("more was sent of a stream than there was room for")
        self._chunks.append(data)
        self._wake()

    def end(self, error: Failure | None = None) -> None:
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Credit:
    """What may be sent of a stream before the reader takes more."""

    def __init__(self) -> None:
        self._left = WINDOW_BYTES
        self._error: Failure | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self, size: int) -> None:
        while self._left < size and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        self._left -= size

    def give(self, size: int) -> None:
        if size < 0 or self._left + size > WINDOW_BYTES:
            raise FrameError("credit for more than was sent")
        self._left += size
        self._wake()

    def fail(self, error: Failure) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Sent:
    """An exchange begun here."""

    def __init__(self, channel: Channel, id: int) -> None:
        self._channel = channel
        self._id = id
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.credit = _Credit()
        self.feeder: asyncio.Future[None] | None = None
        self._body: Inbound | None = None

    def take(self, frame: AnyFrame) -> None:
        if self.result.cancelled():
            return  # its beginner is leaving, and says so when its task runs next: this came in between
        if isinstance(frame, Reply):
            if self.result.done():
                raise FrameError("a second reply")
            if frame.streamed:
                self._body = Inbound(self._channel, self._id, self._left)
            else:
                self._over()
            self.result.set_result(Result(frame.value, self._body))
        elif isinstance(frame, Chunk):
            if self._body is None:
                raise FrameError("a piece of a stream that was not announced")
            self._body.push(frame.data)
        elif isinstance(frame, More):
            self.credit.give(frame.bytes)
        elif isinstance(frame, Fail):
            failure = Failure(frame.message, code=frame.code, status=frame.status, name=frame.name, detail=frame.detail)
            self.fail(failure)
            self._channel._sent.pop(self._id, None)
        elif isinstance(frame, End):
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
        """The other side reads no more of our body."""
        if self.feeder is not None:
            self.feeder.cancel()

    def _over(self) -> None:
        self._channel._sent.pop(self._id, None)
        self.end()

    def _left(self) -> None:
        if self._channel._sent.pop(self._id, None) is not None:
            self._channel._write(frames.Cancel(self._id))
        self.end()


class _Taken:
    """An exchange begun by the other side, and the task that answers it."""

    def __init__(self, channel: Channel, frame: frames.Request) -> None:
        self._channel = channel
        self._id = frame.id
        streamed = getattr(frame, "streamed", False)
        self._body = Inbound(channel, frame.id, lambda: None) if streamed else None
        self._credit = _Credit()
        self._task = asyncio.ensure_future(self._run(frame))
        self._task.add_done_callback(self._over)

    def take(self, frame: AnyFrame) -> None:
        if isinstance(frame, frames.Cancel):
            self.cancel(Failure("the other side left", code="cancelled", name="AbortError"))
        elif isinstance(frame, More):
            self._credit.give(frame.bytes)
        elif isinstance(frame, Reply) or self._body is None:
            raise FrameError("what only the other side could say")
        elif isinstance(frame, Chunk):
            self._body.push(frame.data)
        elif isinstance(frame, End):
            self._body.end()
        elif isinstance(frame, Fail):
            self._body.end(Failure(frame.message, code=frame.code, status=frame.status, name=frame.name))

    def cancel(self, why: Failure) -> None:
        if self._body is not None:
            self._body.end(why)
        self._task.cancel()

    async def _run(self, frame: frames.Request) -> None:
        channel, body = self._channel, None
        try:
            value, body = _split(await channel._answer(frame, self._body))
            reply = frames.encode(Reply(self._id, value, body is not None), channel._max_frame_bytes)
            await channel._room.wait()
            channel._write_raw(reply)
            if body is not None:
                await channel._feed(self._id, body, self._credit)
        except ChannelClosed:
            return
        except Exception as error:
            channel._write(_fail(self._id, channel._describe(error)))
        finally:
            if body is not None:
                await _close(body)

    def _over(self, task: "asyncio.Future[None]") -> None:
        """Also of a task that was cancelled before its first step, whose `finally` never ran."""
        _look_away(task)
        self._channel._taken.pop(self._id, None)
        if self._body is not None:
            self._body.end(Failure("the exchange is over", code="cancelled"))


def _split(answer: Any) -> tuple[Any, AsyncIterator[bytes] | None]:
    if isinstance(answer, Answer):
        return frames.plain(answer.value), answer.body
    if hasattr(answer, "__aiter__"):
        return None, answer
    return frames.plain(answer), None


async def _close(body: AsyncIterator[bytes]) -> None:
    if (aclose := getattr(body, "aclose", None)) is not None:
        with suppress(Exception):  # its reader has left: there is nobody to tell
            await aclose()


def _fail(id: int, failure: Failure) -> Fail:
    message, detail = _sendable(failure.message[:8192]), _sendable(failure.detail[-65536:])
    return Fail(id, failure.code, failure.status, message, failure.name, detail)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _look_away(task: "asyncio.Future[Any]") -> None:
    """Its failure has been told to whom it concerns."""
    if not task.cancelled():
        task.exception()
