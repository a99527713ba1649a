"""WebSockets on our own connections (RFC 6455): messages, close codes, pings, limits.

wsproto encodes the frames.

`WebSocket` is one end of an open one. The size of a message, unread messages, and the wait for a peer that is silent or does not read are limited.
Compression is not offered, because a frame of 64 KiB could contain 64 MiB. Handshakes are in websocket_handshake.py.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from wsproto.connection import Connection as FrameCodec
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage

from pilotlight.support.time_limits import Pauses

HELD_BYTES = 64 << 10  # bytes of unread messages; above this or HELD_MESSAGES the peer is not read
HELD_MESSAGES = 32
WRITE_BUFFER_BYTES = 64 << 10
# frames of one peer that are handled before other connections get a turn: a frame takes 20 us, and 64 KiB may be 10,000 frames
FRAMES_AT_ONCE = 32

NORMAL, GOING_AWAY, NO_STATUS, ABNORMAL, TOO_BIG, FAILED, RESTARTING = 1000, 1001, 1005, 1006, 1009, 1011, 1012


class SocketTimings(NamedTuple):
    # interval of pings: below 60 s, after which proxies, including ours, take a silent connection for dead
    ping_s: float = 20.0
    lost_s: float = 50.0  # a peer is lost if it was pinged and is silent, or reads nothing, for this time
    # wait for the peer's answer to a close; its bytes are read meanwhile, because closing with unread bytes resets the connection
    close_s: float = 1.0


class WebSocketClose(NamedTuple):
    """The end of a WebSocket.
    NO_STATUS: the peer sent no code. ABNORMAL: there was no close frame."""

    code: int
    reason: str = ""


class WebSocket(asyncio.Protocol):
    """One end of an open WebSocket.
    It takes the transport over; one task may use `receive` and another one `send`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        is_client: bool,
        early: bytes,
        max_message_bytes: int,
        on_lost: Callable[[], None] = lambda: None,
        timings: SocketTimings | None = None,
    ) -> None:
        """`early` has the bytes that were read after the handshake.
        `on_lost` is called once, when the connection is gone."""
        self._transport = transport
        self._codec = FrameCodec(ConnectionType.CLIENT if is_client else ConnectionType.SERVER)
        self._max_message_bytes = max_message_bytes
        self._on_lost = on_lost
        timings = timings or SocketTimings()
        self._close_s = timings.close_s
        self._incoming = _Incoming()
        self._end: WebSocketClose | None = None
        self._is_broken = False  # further bytes are ignored
        self._frames: Iterator[Event] = iter(())  # frames that have arrived
        self.is_behind = False  # some frames are not handled yet, and the peer is not read meanwhile
        self._is_lost = False  # the connection was lost; its last frames are still handled
        self._parts: list[Any] = []  # parts of an incomplete message, as text or bytes
        self._size = 0
        self._watch = _Watch(self, timings)
        self._loop = asyncio.get_running_loop()
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if transport.is_closing():
            return self.connection_lost(None)
        transport.resume_reading()
        if early:
            self.data_received(early)

    async def receive(self) -> str | bytes | WebSocketClose:
        """Return the next message; after the last one, the close."""
        message = await self._incoming.get()
        if message is None:
            assert self._end is not None
            return self._end
        if self._watch.is_held:
            self._read_on()
        return message

    async def send(self, message: str | bytes) -> None:
        """Send a message, and wait until the buffer has room. If the peer has left, the message is dropped."""
        if self._codec.state is ConnectionState.OPEN and self._end is None:
            event = TextMessage(message) if isinstance(message, str) else BytesMessage(message)
            self._transport.write(self._codec.send(event))
            await self._watch.until_writable()

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Send a close, and end the connection when the peer has answered, or after a second.
        `receive` returns the peer's answer."""
        if self._codec.state is ConnectionState.OPEN and not self._transport.is_closing():
            self._say_close(WebSocketClose(code, reason))
            self._read_on()
            self._watch.close_within(self._close_s)

    def abort(self) -> None:
        self._transport.abort()

    # Methods that the transport calls.

    def data_received(self, data: bytes) -> None:
        self._watch.heard()
        if self._codec.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING) and not self._is_broken:
            self._codec.receive_data(data)
            if not self.is_behind:
                self._frames = self._codec.events()
                self._take_frames()

    def pause_writing(self) -> None:
        self._watch.full()

    def resume_writing(self) -> None:
        self._watch.writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self.is_behind:
            return  # frames that arrived before the end are handled first
        self._ended(WebSocketClose(ABNORMAL))
        self._watch.stop()
        self._on_lost()

    # frames

    def _take_frames(self) -> None:
        """Handle some frames now, and the others in later turns of the loop."""
        was_behind, self.is_behind = self.is_behind, False
        num_taken = 0
        while self._end is None and (event := next(self._frames, None)) is not None:
            self._take(event)
            num_taken += 1
            if num_taken == FRAMES_AT_ONCE:
                self.is_behind = True
                self._transport.pause_reading()
                self._loop.call_soon(self._take_frames)
                return
        if self._is_lost:
            self.connection_lost(None)
        elif was_behind:
            self._read_on()

    def _take(self, event: Event) -> None:
        is_open = self._codec.state is ConnectionState.OPEN
        if isinstance(event, CloseConnection):
            self._closed_by_peer(WebSocketClose(int(event.code), event.reason or ""))
        elif isinstance(event, Ping) and is_open:
            if not self._watch.is_full:  # the answer to a ping may be delayed or omitted (RFC 6455, 5.5.3)
                self._transport.write(self._codec.send(event.response()))
        elif isinstance(event, Message) and is_open:
            if event.data:
                self._parts.append(event.data)
                self._size += len(event.data.encode() if isinstance(event, TextMessage) else event.data)
            if self._size > self._max_message_bytes:
                self._fail(WebSocketClose(TOO_BIG, "the message is too large"))
            elif event.message_finished:
                self._hand_on("".join(self._parts) if isinstance(event, TextMessage) else b"".join(self._parts))

    def _hand_on(self, message: str | bytes) -> None:
        self._incoming.put(message, self._size)
        self._parts, self._size = [], 0
        if self._incoming.is_full:
            self._watch.is_held = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        """Read from the peer again, unless frames wait, or too many messages are unread on an open WebSocket."""
        has_enough = self._incoming.is_full and self._codec.state is ConnectionState.OPEN
        if not (has_enough or self.is_behind or self._transport.is_closing()):
            if self._watch.is_held:
                self._watch.heard()
                self._watch.is_held = False
            self._transport.resume_reading()

    def _closed_by_peer(self, close: WebSocketClose) -> None:
        if self._codec.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
            return self._fail(close)  # the bytes are not a valid frame
        if self._codec.state is ConnectionState.REMOTE_CLOSING:
            self._say_close(close)
        self._ended(close)
        self._transport.close()
        self._watch.close_within(self._close_s)

    def _fail(self, close: WebSocketClose) -> None:
        """Close the connection because the peer sent invalid data."""
        self._is_broken = True
        if self._codec.state is ConnectionState.OPEN:
            self._say_close(close)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._ended(close)
        self._watch.close_within(self._close_s)

    def _say_close(self, close: WebSocketClose) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._codec.send(CloseConnection(code=close.code, reason=close.reason or None)))

    def _ended(self, close: WebSocketClose) -> None:
        if self._end is None:
            self._end = close
            self._incoming.end()
            self._watch.writable()

    def ping(self) -> None:
        if self._codec.state is ConnectionState.OPEN and not self._watch.is_full:
            self._transport.write(self._codec.send(Ping()))


class _Incoming:
    """Received messages that the application has not taken. `get` returns None after the last one."""

    def __init__(self) -> None:
        self._messages: deque[tuple[str | bytes, int]] = deque()
        self._held_bytes = 0
        self._has_ended = False
        self._news = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._held_bytes > HELD_BYTES or len(self._messages) > HELD_MESSAGES

    def put(self, message: str | bytes, size: int) -> None:
        self._messages.append((message, size))
        self._held_bytes += size
        self._news.set()

    def end(self) -> None:
        self._has_ended = True
        self._news.set()

    async def get(self) -> str | bytes | None:
        while not self._messages:
            if self._has_ended:
                return None
            self._news.clear()
            await self._news.wait()
        message, size = self._messages.popleft()
        self._held_bytes -= size
        return message


class _Watch:
    """Checks whether the peer is alive: pings a silent one; closes if it stays silent or does not read."""

    def __init__(self, socket: WebSocket, timings: SocketTimings) -> None:
        self.is_full = False  # the write buffer has reached its limit
        self.is_held = False  # the peer is not read
        self._socket, self._timings = socket, timings
        self._heard_at = self._full_at = time.monotonic()
        self._pauses = Pauses(timings.ping_s)
        self._pauses.check(self._heard_at)
        self._writable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timings.ping_s, self._look)

    def heard(self) -> None:
        self._heard_at = time.monotonic()

    def full(self) -> None:
        self.is_full, self._full_at = True, time.monotonic()

    def writable(self) -> None:
        self.is_full = False
        self._writable.set()

    async def until_writable(self) -> None:
        if self.is_full:
            self._writable.clear()
            await self._writable.wait()

    def close_within(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._socket.abort)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now, silent_since = time.monotonic(), [self._full_at] if self.is_full else []
        if not self.is_held:
            silent_since.append(self._heard_at)
        if any(self._pauses.silent_s(since, now) > self._timings.lost_s for since in silent_since):
            return self._socket.abort()
        self._socket.ping()
        self._timer = self._loop.call_later(self._timings.ping_s, self._look)
