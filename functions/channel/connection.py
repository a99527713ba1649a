"""The connection that all exchanges share: it dispatches the socket's frames to their exchanges.

It also sends pings and notes, and fails all exchanges when it closes. Both ends use the same class: the runtime with even exchange ids, an isolate
with odd ones. The rules within an exchange are in exchanges.py.
"""

import asyncio
import contextvars
import select
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from msgspec.structs import replace

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import (
    ExchangeResult,
    Handler,
    IncomingExchange,
    OpenExchanges,
    OutgoingExchange,
)
from pilotlight.functions.channel.failure import ChannelClosed, Failure, as_failure, fail_frame
from pilotlight.functions.channel.frames import (
    AnyFrame,
    BindingCall,
    Fail,
    FrameDecoder,
    FrameError,
    More,
    Note,
    Reply,
    StreamChunk,
    StreamEnd,
)
from pilotlight.functions.channel.streams import WINDOW_BYTES

MAX_FRAME_BYTES = 32 << 20  # fits a KV value of 25 MiB with its envelope
FRAMES_AT_ONCE = 128  # frames handled before other tasks run: a small frame takes 2 us, and a read may bring 2 MB
MAX_OPEN = 1024  # maximum number of exchanges that the other side may have open
MAX_HELD_BYTES = 128 << 20  # maximum bytes held for the other side: its open requests and unread replies

_WITHIN = (StreamChunk, StreamEnd, More, Fail, Reply, frames.Cancel)  # frames of an open exchange

current_request: contextvars.ContextVar[int] = contextvars.ContextVar("current_request", default=-1)


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
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """Create a channel without a socket; use `open`.
        `max_held_bytes` limits only the runtime's side, which many isolates share; an isolate's memory is limited by other means."""
        self._answer = answer
        self.describe = describe
        self._on_note = on_note
        self._max_frame_bytes = max_frame_bytes
        self._max_open = max_open
        self._max_held_bytes = max_held_bytes if is_runtime else sys.maxsize
        self.held_bytes = 0  # of open calls
        self._open = OpenExchanges(0 if is_runtime else 1)
        self._decoder = FrameDecoder(max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._pings: dict[int, asyncio.Future[None]] = {}
        self.room = asyncio.Event()
        self.room.set()
        self.closed = asyncio.Event()
        self.why_closed = ""

    @classmethod
    async def open(cls, sock: socket.socket, answer: Handler, *, is_runtime: bool, **options: Any) -> "Channel":
        """Open a channel on a connected socket, which it then owns.

        `answer` handles the requests of the other side.
        """
        channel = cls(answer, is_runtime=is_runtime, **options)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        channel._socket = sock
        return channel

    # -- beginning an exchange --------------------------------------------------------------------------------------------------

    async def call(self, binding: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a binding's method and return its value.
        A stream in the reply is cancelled; use `begin` to get it."""
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
    ) -> ExchangeResult:
        """Call a binding's method, optionally with a body; return the value and the stream of its reply."""
        sent_args, sent_kwargs = frames.plain(list(args), f"{method}'s arguments"), frames.plain(kwargs or {}, method)
        within, is_streamed = current_request.get(), body is not None
        call = BindingCall(self.new_id(), binding, method, sent_args, sent_kwargs, is_streamed, within)
        return await self.request(call, body)

    def call_now(self, binding: str, method: str, **kwargs: Any) -> Any:
        """Call a binding's method from code that cannot await; the event loop is blocked until the reply.
        The call is not attributed to any request."""
        sent = self._outgoing_call(BindingCall(self.new_id(), binding, method, [], frames.plain(kwargs, method)))
        try:
            self._exchange_until(sent.result.done)
            result = sent.result.result()
        finally:
            self.forget(sent.id)
            sent.end()
        if result.body is not None:
            result.body.cancel()
        return result.value

    def _exchange_until(self, is_done: Callable[[], bool]) -> None:
        """Send and receive until `is_done`; bytes that are still in asyncio's transport are sent first.

        Frames that arrive meanwhile, including pings, are handled at once; callbacks that they schedule run later, in the loop. Raises ChannelClosed.
        """
        assert self._transport is not None
        assert self._socket is not None
        transport, poll = self._transport, select.poll()
        while not is_done():
            if transport.is_closing():
                raise ChannelClosed(self.why_closed or "the connection to the other process is closed")
            is_waiting = transport.get_write_buffer_size() > 0
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if is_waiting else 0))
            events = poll.poll()[0][1]
            if events & select.POLLOUT and is_waiting:
                transport._write_ready()  # type: ignore[attr-defined]  # selector transports have it in 3.11 to 3.14
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive(self._socket)

    def _receive(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(WINDOW_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"the connection to the other process broke: {error}") from None
        if not data:
            raise ChannelClosed("the other process closed the connection")
        self.data_received(data)

    async def request(self, frame: frames.Request, body: AsyncIterator[bytes] | None = None) -> ExchangeResult:
        """Run an exchange that starts with `frame`, whose id is UNNUMBERED or new.
        Cancelling the task cancels the exchange at the other end. Raises Failure."""
        if frame.id == frames.UNNUMBERED:
            frame = replace(frame, id=self.new_id())
        sent = self._outgoing_call(frame)
        if body is not None:
            sent.send(body)
        try:
            return await sent.result
        except BaseException:
            if self.forget(sent.id):
                self.write(frames.Cancel(sent.id))
            sent.end()
            raise

    def new_id(self) -> int:
        """Return an id for a new exchange. Raises ChannelClosed."""
        if self.closed.is_set():
            raise ChannelClosed(self.why_closed or "the connection to the other process is closed")
        return self._open.new_id()

    def _outgoing_call(self, frame: frames.Request) -> OutgoingExchange:
        data = self.encode(frame)
        sent = OutgoingExchange(self, frame.id)
        self._open.begin(sent)
        self.write_bytes(data)
        return sent

    def note(self, name: str, value: Any = None) -> None:
        self.write(Note(0, name, value))

    async def ping(self) -> None:
        """Wait until the other side's event loop has replied to a ping. Raises ChannelClosed."""
        id = self.new_id()
        self._pings[id] = asyncio.get_running_loop().create_future()
        self.write(frames.Ping(id))
        try:
            await self._pings[id]
        finally:
            self._pings.pop(id, None)

    def close(self, why: str = "") -> None:
        """Close the channel at once; all open exchanges fail at both ends."""
        self.why_closed = self.why_closed or why
        if self._transport is not None:
            self._transport.abort()

    @property
    def num_open(self) -> int:
        """Return the number of open exchanges, whichever side started them."""
        return len(self._open)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WINDOW_BYTES)

    def data_received(self, data: bytes) -> None:
        num_frames = 0
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
                num_frames += 1
        except FrameError as error:
            self.close(f"the other process broke the protocol: {error}")
        if num_frames > FRAMES_AT_ONCE and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self.room.set()
        gone = ChannelClosed(self.why_closed or "the other process closed the connection")
        self._open.fail(gone)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(gone)

    # -- frames -------------------------------------------------------------------------------------------------------------------

    def _take(self, frame: AnyFrame) -> None:
        if isinstance(frame, _WITHIN):
            if (exchange := self._open.get(frame.id)) is not None:  # None if it has ended at this side only
                exchange.take(frame)
        elif isinstance(frame, frames.Ping):
            if self.room.is_set():  # a peer that does not read its pongs gets no more
                self.write(frames.Pong(frame.id))
        elif isinstance(frame, frames.Pong):
            if (ping := self._pings.get(frame.id)) is not None and not ping.done():
                ping.set_result(None)
        elif isinstance(frame, Note):
            if self._on_note is not None:
                self._on_note(frame)
        else:
            self._begin(frame)

    def _begin(self, frame: frames.Request) -> None:
        if self._open.is_ours(frame.id) or frame.id in self._open.taken:
            raise FrameError(f"the id {frame.id} cannot begin an exchange")
        try:
            if len(self._open.taken) >= self._max_open:
                sentence = f"{self._max_open} exchanges are open already; wait for some of them"
                raise Failure(sentence, code="too_many_open", status=429)
            self.hold(self._decoder.size)
        except Failure as refusal:
            if not self.room.is_set():
                raise FrameError(
                    "too many exchanges were started by a peer that does not read their refusals"
                ) from None
            self.write(fail_frame(frame.id, refusal))
            return
        self._open.taken[frame.id] = IncomingExchange(self, frame, self._decoder.size, self._answer)

    # -- called by exchanges and streams ----------------------------------------------------------------------------------------------

    def hold(self, size: int) -> None:
        """Count bytes kept in memory here for the other side, until `release`. Raises Failure above the limit."""
        if self.held_bytes and self.held_bytes + size > self._max_held_bytes:
            sentence = f"open calls hold {self.held_bytes} bytes here already, of at most {self._max_held_bytes}; wait for some of them"
            raise Failure(sentence, code="overloaded", status=429)
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held_bytes -= size

    def write(self, frame: AnyFrame) -> None:
        self.write_bytes(self.encode(frame))

    def encode(self, frame: AnyFrame) -> bytes:
        return frames.encode(frame, self._max_frame_bytes)

    def write_bytes(self, data: bytes) -> None:
        if self._transport is not None and not self.closed.is_set():
            self._transport.write(data)

    def forget(self, id: int) -> bool:
        return self._open.forget(id)
