"""One request on an HTTP/1.1 connection, and its answer: the `receive` and `send` of an ASGI application, and shorter ways for our own.

Knows bodies, heads of answers, chunks and what an application owes its client; refuses to know sockets, limits and parsers: those are its
connection's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from wire.http.request_head import RequestHead

DIRECT = "pilotlight.direct"  # in the scope: the Exchange itself, for what need not wait: no task has to listen for the client's leaving
HELD_BODY_BYTES = 512 << 10  # of a body that nobody has asked for yet; beyond it the client is not read

Application = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]

# A shorter way for our own: the Exchange itself, without a scope. None: this request is to take the long one.
Direct = Callable[["Exchange"], Coroutine[Any, Any, None] | None]

log = logging.getLogger(__name__)


class Carrier(Protocol):
    """What an exchange asks of its connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    is_full: bool  # what waits for the client has reached the buffer's size

    @property
    def date(self) -> bytes: ...

    @property
    def is_last(self) -> bool:
        """No request will be taken after this one."""
        ...

    def hold_back(self) -> None: ...

    def read_on(self) -> None: ...

    def finished(self, exchange: "Exchange") -> None: ...

    def abort(self) -> None: ...


class Exchange:
    __slots__ = (
        "_around", "_connection", "_expects", "_held", "_is_chunked", "_is_empty", "_is_held", "_on_gone", "_owed", "_parts", "_rest",
        "_scope", "_start", "_told", "_waiters", "declared_length", "has_all", "has_begun", "head", "is_done", "is_gone", "keep_alive",
        "task",
    )  # fmt: skip

    def __init__(
        self, connection: Carrier, head: RequestHead, around: dict[str, Any], declared_length: bytes | None
    ) -> None:
        """`around`: what a scope tells of the connection."""
        self.head = head
        self.declared_length = declared_length  # as the head has it
        self._around = around
        self._scope: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None
        self._rest: Awaitable[None] | None = None  # of the application's work, before it has a task
        self._is_held = False
        self.has_all = False  # of the body
        self.has_begun = self.is_done = self.is_gone = False
        self.keep_alive = head.keep_alive
        self._expects = head.expects
        self._connection = connection
        self._parts: list[bytes] = []
        self._held = 0
        self._told = False  # the application has had the whole body
        self._start: MutableMapping[str, Any] | None = None
        self._is_chunked = False
        self._is_empty = head.method == b"HEAD"  # nothing follows the answer's head
        self._owed: int | None = None  # of the length that the answer's head has named
        self._waiters: list[asyncio.Future[None]] = []  # an application may receive and send at once
        self._on_gone: Callable[[], None] | None = None

    @classmethod
    def whole(
        cls, connection: Carrier, head: RequestHead, around: dict[str, Any], length: bytes, body: bytes
    ) -> "Exchange":
        """All of whose request is here."""
        exchange = cls(connection, head, around, length)
        exchange._parts.append(body)
        exchange.has_all = True
        return exchange

    @property
    def scope(self) -> dict[str, Any]:
        if self._scope is None:
            self._scope = self.head.scope | self._around
            self._scope[DIRECT] = self
            length = [] if self.declared_length is None else [(b"content-length", self.declared_length)]
            self._scope["headers"] = self.head.headers + length  # a list of its own: applications may change it
        return self._scope

    @property
    def path(self) -> str:
        path: str = self.head.scope["path"]
        return path

    @property
    def client(self) -> str:
        """Its address; empty where it has none."""
        peer = self._around["client"]
        return str(peer[0]) if peer else ""

    def begin(self, app: Application, direct: "Direct | None" = None) -> None:
        """An application that is no coroutine function does at once, here, what need not wait, and returns what does. `direct`: a shorter way in."""
        try:
            rest = direct(self) if direct is not None else None
            self._rest = app(self.scope, self.receive, self.send) if rest is None else rest
        except Exception as error:
            self._rest = _raised(error)
        if not self._is_held:
            self.go_on()

    def hold(self) -> None:
        """For an application that has begun its work elsewhere: the rest of it waits for `go_on`, or for the client's leaving."""
        self._is_held = True

    def go_on(self) -> None:
        self._is_held = False
        rest, self._rest = self._rest, None
        if rest is not None:
            self.task = self._connection.loop.create_task(self._run(rest))

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """Called once, when the client leaves before its answer is complete; None takes the callback back."""
        self._on_gone = callback
        if callback is not None and self.is_gone:
            self._connection.loop.call_soon(callback)

    def whole_body(self) -> bytes | None:
        """Where all of it is here already and the application has had none; else None, and it is to be received."""
        if not self.has_all or self._told or self.is_gone or self.is_done:
            return None
        self._told = True
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        return body

    @property
    def may_send_more(self) -> bool:
        """The client: some of its body is on its way, unless it waits to be asked for it."""
        return not (self.has_all or self._expects)

    @property
    def is_ready(self) -> bool:
        """A further part of the answer can be written now."""
        return self.has_begun and not (self._connection.is_full or self.is_gone or self.is_done)

    @property
    def may_start(self) -> bool:
        """The answer can be begun now."""
        return not (self.has_begun or self._connection.is_full or self.is_gone or self.is_done)

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """An answer of which more will follow, while `may_start`: head and first part in one write."""
        head = self._head(status, headers, body, is_last=False)
        self.has_begun = True
        self._connection.transport.write(head if self._is_empty else head + self._framed(body))

    def write(self, body: bytes) -> None:
        """Some of an answer that has begun, while `is_ready`."""
        if body and not self._is_empty:
            self._connection.transport.write(self._framed(body))

    def _framed(self, body: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(body), body) if self._is_chunked else body

    def take(self, body: bytes) -> None:
        if self.is_done:
            return
        self._parts.append(body)
        self._held += len(body)
        if self._held > HELD_BODY_BYTES:
            self._connection.hold_back()
        self.wake()

    def end_body(self) -> None:
        self.has_all = True
        self.wake()

    def gone(self) -> None:
        self.is_gone = True
        callback, self._on_gone = self._on_gone, None
        if callback is not None and not self.is_done:
            callback()
        self.wake()
        self.go_on()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _run(self, answering: Awaitable[None]) -> None:
        try:
            await answering
            failure = None if self.is_done or self.is_gone else "it returned before the end of its answer"
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception:
            log.exception("the application failed")
            failure = "it raised"
        if failure is None:
            return
        if self.has_begun:
            self._connection.abort()  # the client must not take what it has for the whole
        else:
            log.error("the application gave no answer: %s", failure)
            self._start = {"status": 500, "headers": []}
            await self.send({"type": "http.response.body", "body": b""})

    async def receive(self) -> dict[str, Any]:
        while True:
            if self.is_gone or self.is_done:
                return {"type": "http.disconnect"}
            if self._parts or (self.has_all and not self._told):
                body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._held, self._told = 0, self.has_all
                if not self.has_all:
                    self._connection.read_on()
                return {"type": "http.request", "body": body, "more_body": not self.has_all}
            if self._expects and not self.has_begun:
                self._expects = False
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._wait()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.is_gone or self.is_done:
            return await asyncio.sleep(0)  # an application that does nothing else would hold up everybody
        if message["type"] == "http.response.start":
            self._start = message
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self._connection.loop.call_soon(self._lead)
            return
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        head = b""
        if self._start is not None:
            head = self._head(self._start["status"], self._start.get("headers", ()), body, is_last)
        if self._is_empty:
            body = b""
        elif self._is_chunked:
            body = _chunk(body, is_last)
        elif self._owed is not None:
            self._pay(len(body), is_last)
        if head:
            self._start, self.has_begun = None, True
        if head or body:
            self._connection.transport.write(head + body)
        if is_last:
            self.is_done = True
            self._on_gone = None
            self._connection.finished(self)
            return
        while self._connection.is_full and not self.is_gone:
            await self._wait()

    def _lead(self) -> None:
        """A stream's head does not wait for its first part: the client learns from it that it is being served."""
        if self._start is None or self.is_gone or self.is_done:
            return
        try:
            head = self._head(self._start["status"], self._start.get("headers", ()), b"", is_last=False)
        except ValueError:
            return  # the application is told with its first part
        self._start, self.has_begun = None, True
        self._connection.transport.write(head)

    def switching_head(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The answer that switches protocols."""
        lines = [b"connection: Upgrade\r\n", *(b"%s: %s\r\n" % pair for pair in checked(headers))]
        return _status_line(101) + b"".join(lines) + self._connection.date + b"\r\n"

    def _pay(self, num_bytes: int, is_last: bool) -> None:
        """What is more than was named would be read as the head of the next answer."""
        assert self._owed is not None
        self._owed -= num_bytes
        if self._owed < 0 or (is_last and self._owed > 0):
            raise ValueError("an answer's body is not as long as its content-length says")

    async def _wait(self) -> None:
        waiter = self._connection.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes, is_last: bool) -> bytes:
        parts = [_status_line(status)]
        self._owed = None
        for name, value in checked(headers):
            if len(name) == 14 and name.lower() == b"content-length":
                self._owed = _length(value, self._owed)
            parts += (name, b": ", value, b"\r\n")
        if status < 200 or status in (204, 304):
            self._is_empty = True
        elif self._owed is None:
            if is_last:
                # An application that left a HEAD request's body out has not said how long it would have been.
                if body or self.head.method != b"HEAD":
                    parts.append(b"content-length: %d\r\n" % len(body))
            elif self.head.version == "1.1":
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # HTTP/1.0: the end of the connection is the end of the answer
        if not self.has_all:
            self.keep_alive = False
        if not self.keep_alive or self._connection.is_last:
            parts.append(b"connection: close\r\n")
        elif self.head.version == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        parts.append(self._connection.date)
        return b"".join(parts) + self.head.answer_headers + b"\r\n"


def checked(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The same. Raises ValueError for a line end inside one."""
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
            raise ValueError("a header holds a line end")
        yield name, value


async def _raised(error: Exception) -> None:
    raise error


def _length(value: bytes, before: int | None) -> int:
    if before is not None or not value.isdigit():
        raise ValueError("an answer names its length more than once, or not by a number")
    return int(value)


def _chunk(body: bytes, is_last: bool) -> bytes:
    chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    return chunk + b"0\r\n\r\n" if is_last else chunk


_STATUS_LINES: dict[int, bytes] = {}


def _status_line(status: int) -> bytes:
    line = _STATUS_LINES.get(status)
    if line is None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        line = _STATUS_LINES[status] = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return line
