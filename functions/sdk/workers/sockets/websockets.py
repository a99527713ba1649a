"""WebSockets in functions: `WebSocketPair` with two connected ends, and their events.

Messages sent at one end arrive at the other. The end that a response carries is connected to the client (workers/sockets/joints.py). The function
keeps the other end, and listens (`addEventListener`, `onmessage`) or iterates: `async for message in server`. `send` waits for the receiver only if
it is awaited.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Generator, Iterator
from typing import Any

import msgspec

from pilotlight.functions.channel.socket_messages import ABNORMAL, MAX_REASON_BYTES, NO_STATUS, Message, SocketClose
from workers import host
from workers.face import Buffer, Named
from workers.trouble import print_trouble
from workers.values import pack, unpack

ROOM_BYTES = 256 << 10  # while an end has more unread bytes, the client and awaited sends wait
MAX_WAITING_BYTES = 16 << 20  # if an end has more unread bytes, the next send closes the socket with code 1013
MESSAGE_COST = 64  # bytes counted for each message, because empty ones use memory, too
MAX_HANDLERS = 64  # maximum number of running handlers of one socket; further messages wait
MAX_ATTACHMENT_BYTES = 2048
EVENTS = ("message", "close", "error", "open")


class Event(Named):
    def __init__(self, type: str, target: "EventTarget") -> None:
        self.type = type
        self.target = self.current_target = target


class MessageEvent(Event):
    def __init__(self, target: "EventTarget", data: "str | Buffer") -> None:
        super().__init__("message", target)
        self.data = data


class CloseEvent(Event):
    def __init__(self, target: "EventTarget", close: SocketClose) -> None:
        super().__init__("close", target)
        self.code, self.reason = close.code, close.reason
        self.was_clean = close.code != ABNORMAL


class ErrorEvent(Event):
    def __init__(self, target: "EventTarget", message: str) -> None:
        super().__init__("error", target)
        self.message = message

    def __repr__(self) -> str:
        return f"<ErrorEvent {self.message!r}>"


class EventTarget(Named):
    """The listeners for a socket's events, and the handlers that are running."""

    onmessage: Any = None
    onclose: Any = None
    onerror: Any = None
    onopen: Any = None

    def __init__(self) -> None:
        self._listeners: dict[str, list[tuple[Any, bool]]] = {}
        self._handlers: set[asyncio.Future[Any]] = set()
        self._run_event: host.EventRunner | None = None

    def add_event_listener(self, type: str, listener: Any, options: Any = None) -> None:
        if type not in EVENTS:
            raise TypeError(f"a WebSocket has no event {type!r}; it has {', '.join(EVENTS)}")
        is_once = bool(options.get("once")) if isinstance(options, dict) else False
        self._listeners.setdefault(type, []).append((listener, is_once))

    def remove_event_listener(self, type: str, listener: Any, options: Any = None) -> None:
        kept = [entry for entry in self._listeners.get(type, ()) if entry[0] != listener]
        self._listeners[type] = kept

    async def _fire(self, event: Event) -> None:
        entries = self._listeners.get(event.type, [])
        self._listeners[event.type] = [entry for entry in entries if not entry[1]]
        listeners = [listener for listener, _ in entries]
        if (plain := getattr(self, f"on{event.type}", None)) is not None:
            listeners.insert(0, plain)
        for listener in listeners:
            self._handle(self._heard(listener, event))
        if listeners:
            await asyncio.sleep(0)  # lets the handlers start before the next message is handled

    async def _heard(self, listener: Any, event: Event) -> None:
        async def act() -> None:
            result = listener(event)
            if hasattr(result, "__await__"):
                await result

        await (act() if self._run_event is None else self._run_event(act))

    def _handle(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(_told(work))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)


async def _told(work: Awaitable[Any]) -> None:
    try:
        await work
    except (Exception, SystemExit) as error:
        print_trouble("a WebSocket's handler", error)


class WebSocket(EventTarget):
    """One end of a WebSocketPair, or the socket of an outgoing connection."""

    CONNECTING, OPEN, CLOSING, CLOSED = 0, 1, 2, 3
    READY_STATE_CONNECTING, READY_STATE_OPEN, READY_STATE_CLOSING, READY_STATE_CLOSED = 0, 1, 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.binary_type = "arraybuffer"
        self.protocol = self.extensions = self.url = ""
        self._peer: WebSocket = self
        self._inbox = _Inbox()
        self._has_closed = False  # whether this end has sent a close
        self._was_closed = False  # whether this end has received a close
        self._is_accepted = self._is_iterated = self._is_joined = self._has_told_close = False
        self._dispatching: asyncio.Task[None] | None = None
        self._hibernation: Any = None  # the ObjectSockets of the Durable Object that accepted it
        self._attachment: bytes | None = None

    @classmethod
    def new(cls, url: Any, protocols: Any = None) -> "WebSocket":
        """Connect to a server; an `open` event reports success, `error` and `close` events report failure."""
        from workers.http.outbound import connect  # imported late, because outbound.py imports this module

        return connect(str(url), [protocols] if isinstance(protocols, str) else list(protocols or ()))

    # -- called by the function ------------------------------------------------------------------------------------------------------

    def accept(self, options: Any = None) -> None:
        """Start to deliver messages."""
        self._take("accept()")
        self._run_event = host.event_runner.get()
        if (listening := host.listening_sockets.get()) is not None:
            listening.add(self)
        self._answer_close()
        self._dispatch_soon()

    def send(self, message: Any) -> "Sending":
        """Send a message and return at once; `await` the result to wait until the receiver has room."""
        data = _data(message)
        limit = host.max_message_bytes
        if len(data) > limit // 4 and len(_as_bytes(data)) > limit:
            raise ValueError(f"a WebSocket message may have {limit} bytes here; send less at once")
        if self._hibernation is None and not (self._is_accepted or self._is_joined):
            raise TypeError("Can't call WebSocket send() before accept()")
        if self._has_closed and not self._was_closed:
            raise TypeError("Can't call WebSocket send() after close()")
        inbox = self._peer._inbox
        if self._was_closed:
            return Sending(inbox)  # as in a browser, sending to a closed peer is not an error
        host.leave()
        if inbox.held_bytes > MAX_WAITING_BYTES:
            inbox.drop()
            self._close(SocketClose(1013, "the other side reads too slowly"))
            raise BufferError(
                f"more than {MAX_WAITING_BYTES >> 20} MiB wait for the other side; await send() to wait for room"
            )
        inbox.put(data)
        return Sending(inbox)

    def close(self, code: Any = None, reason: Any = None) -> None:
        """Close with this code, by default 1000.
        The close event follows when the other side has answered."""
        if self._has_closed:
            return
        checked = _checked_close(code, reason)
        if not self._is_joined and self._hibernation is None:
            self._is_accepted = True
        host.leave()
        self._close(checked)

    @property
    def ready_state(self) -> int:
        if self._has_closed:
            return self.CLOSED if self._was_closed else self.CLOSING
        return self.OPEN

    @property
    def buffered_amount(self) -> int:
        return self._peer._inbox.held_bytes

    def add_event_listener(self, type: str, listener: Any, options: Any = None) -> None:
        super().add_event_listener(type, listener, options)
        self._dispatch_soon()

    def serialize_attachment(self, value: Any) -> None:
        """Store a value with the socket, for the Durable Object that has accepted it."""
        data = msgspec.msgpack.encode(pack(value, "the attachment"))
        if len(data) > MAX_ATTACHMENT_BYTES:
            raise ValueError(f"an attachment may have {MAX_ATTACHMENT_BYTES} bytes, and this one has {len(data)}")
        self._attachment = data

    def deserialize_attachment(self) -> Any:
        return None if self._attachment is None else unpack(msgspec.msgpack.decode(self._attachment))

    def __aiter__(self) -> "WebSocket":
        """Iterate over messages (str or bytes) until the other side closes.
        `close_code` and `close_reason` are set then."""
        self._take("iterate over")
        self._is_iterated = True
        return self

    async def __anext__(self) -> "str | Buffer":
        message = await self.receive()
        if isinstance(message, SocketClose):
            raise StopAsyncIteration
        return message

    async def receive(self) -> "str | Buffer | SocketClose":
        """Return the next message; after the last one, always the close."""
        self._is_iterated = True
        message = await self._inbox.take()
        if isinstance(message, SocketClose):
            self._inbox.put(message)
            if not self._has_told_close:
                self._has_told_close = True
                await self._fire(CloseEvent(self, message))
            return message
        return Buffer(message) if isinstance(message, bytes) else message

    @property
    def close_code(self) -> int | None:
        return self._inbox.close.code if self._inbox.close is not None else None

    @property
    def close_reason(self) -> str:
        return self._inbox.close.reason if self._inbox.close is not None else ""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("onmessage", "onclose") and value is not None:
            self._dispatch_soon()

    def __repr__(self) -> str:
        return f"<WebSocket {('connecting', 'open', 'closing', 'closed')[self.ready_state]}>"

    # -- called by the channel -------------------------------------------------------------------------------------------------------

    def _take(self, how: str) -> None:
        """Mark this end as used by the function. Raises TypeError if a response or a Durable Object has it."""
        if self._is_joined or self._hibernation is not None:
            sentence = f"this end of the WebSocket is taken already: {how} the end that the response does not carry"
            raise TypeError(sentence)
        self._is_accepted = True

    def _put(self, message: Message) -> None:
        """Receive a message from the other end."""
        if self._was_closed:
            return
        self._inbox.put(message)
        if isinstance(message, SocketClose):
            self._was_closed = True
            self._answer_close()

    def _answer_close(self) -> None:
        """Answer a close at once, even if the function is busy.
        If this end is connected to a remote side, that side answers."""
        close = self._inbox.close
        if close is not None and not self._has_closed and (self._is_accepted or self._hibernation is not None):
            self._close(SocketClose(NO_STATUS if close.code == ABNORMAL else close.code, close.reason))

    def _close(self, close: SocketClose) -> None:
        self._has_closed = True
        self._peer._put(close)

    def _discard(self, close: SocketClose) -> None:
        """Close, and deliver no further events: the Durable Object that would get them is gone."""
        if self._dispatching is not None:
            self._dispatching.cancel()
        if not self._has_closed:
            self._close(close)

    def _accept_for(self, hibernation: Any) -> None:
        if self._is_accepted or self._is_joined or self._hibernation is not None:
            raise TypeError("acceptWebSocket needs a socket that was not accepted before")
        self._hibernation = hibernation
        self._start()

    def _dispatch_soon(self) -> None:
        wanted = self.onmessage or self.onclose or any(self._listeners.values())
        if self._is_accepted and wanted and not self._is_iterated and self._dispatching is None:
            self._start()

    def _start(self) -> None:
        self._dispatching = asyncio.ensure_future(self._dispatch())

    async def _dispatch(self) -> None:
        """Start handlers in the order of their messages; as in a browser, a later one may finish first."""
        while True:
            await self._inbox.any()
            if self._is_iterated:
                return
            message = await self._inbox.take()
            if isinstance(message, SocketClose):
                await self._deliver(CloseEvent(self, message))
                return
            await self._deliver(MessageEvent(self, Buffer(message) if isinstance(message, bytes) else message))
            while len(self._handlers) >= MAX_HANDLERS:
                await asyncio.wait(self._handlers, return_when=asyncio.FIRST_COMPLETED)

    async def _deliver(self, event: Any) -> None:
        if self._hibernation is not None:
            self._handle(self._hibernation.on_event(self, event))
            await asyncio.sleep(0)
        else:
            await self._fire(event)


class Sending:
    """The awaitable result of `send`: waits until the receiver has room."""

    def __init__(self, inbox: "_Inbox") -> None:
        self._inbox = inbox

    def __await__(self) -> Generator[Any, None, None]:
        return self._inbox.room().__await__()


class WebSocketPair:
    """A pair of connected ends: `client, server = WebSocketPair()`.

    Pyodide's `WebSocketPair.new().object_values()` works, too.
    """

    def __init__(self) -> None:
        one, other = WebSocket(), WebSocket()
        one._peer, other._peer = other, one
        self._ends = (one, other)

    @classmethod
    def new(cls) -> "WebSocketPair":
        return cls()

    def object_values(self) -> list[WebSocket]:
        return list(self._ends)

    def __getitem__(self, index: Any) -> WebSocket:
        return self._ends[int(index)]

    def __iter__(self) -> Iterator[WebSocket]:
        return iter(self._ends)

    def __len__(self) -> int:
        return 2

    def to_py(self, **_: Any) -> list[WebSocket]:
        return list(self._ends)


class WebSocketRequestResponsePair(Named):
    """The argument of `ctx.setWebSocketAutoResponse`."""

    def __init__(self, request: str, response: str) -> None:
        self.request, self.response = str(request), str(response)

    @classmethod
    def new(cls, request: str, response: str) -> "WebSocketRequestResponsePair":
        return cls(request, response)


class _Inbox:
    """A queue of messages, of which a close is the last."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.close: SocketClose | None = None
        self._messages: deque[Message] = deque()
        self._changed: set[asyncio.Future[None]] = set()

    def put(self, message: Message) -> None:
        if isinstance(message, SocketClose):
            self.close = message
        self._messages.append(message)
        self.held_bytes += _cost(message)
        self._wake()

    async def take(self) -> Message:
        await self.any()
        message = self._messages.popleft()
        self.held_bytes -= _cost(message)
        self._wake()
        return message

    async def any(self) -> None:
        while not self._messages:
            await self._change()

    async def room(self) -> None:
        while self.held_bytes > ROOM_BYTES and self.close is None:
            await self._change()

    def drop(self) -> None:
        self._messages.clear()
        self.held_bytes = 0
        self._wake()

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.add(waiter)
        try:
            await waiter
        finally:
            self._changed.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._changed:
            if not waiter.done():
                waiter.set_result(None)


def _cost(message: Message) -> int:
    return MESSAGE_COST if isinstance(message, SocketClose) else len(message) + MESSAGE_COST


def _data(message: Any) -> str | bytes:
    if isinstance(message, str):
        return message
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    if hasattr(message, "to_bytes") and not isinstance(message, int):
        return bytes(message.to_bytes())
    if isinstance(message, (bool, int, float)) or message is None:
        return str(message)
    kind = type(message).__name__
    hint = "; json.dumps(...) makes a str of it" if isinstance(message, (dict, list)) else ""
    raise TypeError(f"a WebSocket sends str and bytes, and not {kind}{hint}")


def _as_bytes(data: str | bytes) -> bytes:
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def _checked_close(code: Any, reason: Any) -> SocketClose:
    if code is None:
        code = 1000
    if isinstance(code, bool) or not isinstance(code, int) or not _may_be_sent(code):
        raise ValueError(
            f"{code!r} is no code that a WebSocket can be closed with; 1000 and 3000 to 4999 are the usual ones"
        )
    text = "" if reason is None else str(reason)
    if len(text.encode("utf-8", "replace")) > MAX_REASON_BYTES:
        raise ValueError(f"the reason of a close may have {MAX_REASON_BYTES} bytes")
    return SocketClose(code, text)


def _may_be_sent(code: int) -> bool:
    return 3000 <= code <= 4999 or (1000 <= code <= 1014 and code not in (1004, NO_STATUS, ABNORMAL))
