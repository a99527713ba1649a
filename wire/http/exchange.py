"""One request on an HTTP/1.1 connection, and its response: an ASGI application's `receive` and `send`.

This module handles bodies, chunks and incomplete responses. Sockets, limits and parsers belong to the connection.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, MutableMapping
from functools import cache
from http import HTTPStatus
from typing import Any, Protocol

from pilotlight.wire.http.request import RequestHead

SLICE_BYTES = 16 << 10  # size of a write: the write buffer exceeds its limit by at most one slice
HELD_BODY_BYTES = 512 << 10  # body bytes that the application has not read; above it the client is not read

Application = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]
Pairs = Iterable[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class ServerState(Protocol):
    is_stopping: bool
    date: bytes  # the whole line of the Date header


class ClientWatcher(Protocol):
    def gone(self) -> None:
        """Called when the client has left."""


class ExchangeConnection(Protocol):
    """The part of a connection that its exchanges use."""

    is_full: bool  # the write buffer has reached its limit
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    @property
    def server(self) -> ServerState: ...

    def finished(self, exchange: "HttpExchange", /) -> None: ...

    def forget(self, exchange: "HttpExchange", /) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class HttpExchange:
    def __init__(self, connection: ExchangeConnection, head: RequestHead, around: dict[str, Any]) -> None:
        """`around` has the fields that all scopes of the connection have."""
        self.scope = head.scope(around)
        self.task: asyncio.Task[None] | None = None
        self.body = RequestBody(expects=head.expects)
        self.framing = ResponseFraming(head)
        self.has_started = self.is_done = self.is_gone = False
        self._connection = connection
        self._start: MutableMapping[str, Any] | None = None
        self._waiters: list[asyncio.Future[None]] = []  # an application may receive and send at the same time
        self._watcher: ClientWatcher | None = None

    def begin(self, app: Application) -> None:
        self.task = self._connection.loop.create_task(self._run(app))

    async def _run(self, app: Application) -> None:
        try:
            await app(self.scope, self.receive, AnswerSender(self))
            failure = None if self.is_done or self.is_gone else "it returned before its response was complete"
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception:
            log.exception("the application failed")
            failure = "it raised"
        finally:
            if self.is_gone:
                self._connection.forget(self)
        if failure is None:
            return
        if self.has_started:
            self._connection.abort()  # otherwise the client would take the incomplete response for complete
        else:
            log.error("the application sent no response: %s", failure)
            self._start = {"status": 500, "headers": []}
            await self.send({"type": "http.response.body", "body": b""})

    # Methods that the connection calls.

    def take(self, part: bytes) -> None:
        if self.is_done:
            return
        self.body.add(part)
        if self.body.held_bytes > HELD_BODY_BYTES:
            self._connection.pause_reading()
        self.wake()

    def end_body(self) -> None:
        self.body.is_whole = True
        self.wake()

    def gone(self) -> None:
        self.is_gone = True
        self.wake()
        if self._watcher is not None:
            self._watcher.gone()

    def watched_by(self, watcher: "ClientWatcher | None") -> None:
        """Call `watcher` when the client leaves, or at once if it has left; None ends the watch."""
        self._watcher = watcher
        if self.is_gone and watcher is not None:
            watcher.gone()

    def switched(self, headers: Pairs) -> None:
        """Answer with 101. The exchange has ended, and the connection speaks another protocol."""
        self.is_done = self.has_started = True
        connection = self._connection
        connection.transport.write(response_head(101, headers, b"connection: Upgrade\r\n", connection.server.date))
        self.wake()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Methods that the application calls.

    async def receive(self) -> dict[str, Any]:
        body = self.body
        while True:
            if self.is_gone or self.is_done:
                return {"type": "http.disconnect"}
            if (part := body.take()) is not None:
                if not body.is_whole:
                    self._connection.resume_reading()
                return {"type": "http.request", "body": part, "more_body": not body.is_whole}
            if body.expects and not self.has_started:
                body.expects = False
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._wait()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.is_gone or self.is_done:
            return await asyncio.sleep(0)  # lets other tasks run if the application does nothing but send
        connection = self._connection
        if message["type"] == "http.response.start":
            self._start = message
            connection.loop.call_soon(self._lead)
            return
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        head = self._head(len(body) if is_last else None) if self._start is not None else b""
        if len(body) > SLICE_BYTES:
            for start in range(0, len(body) - SLICE_BYTES, SLICE_BYTES):
                self._write(head + self.framing.framed(body[start : start + SLICE_BYTES], is_last=False))
                head = b""
                await self._until_room()
                if self.is_gone:
                    return
            body = body[-(len(body) % SLICE_BYTES or SLICE_BYTES) :]
        self._write(head + self.framing.framed(body, is_last))
        if is_last:
            self.is_done = True
            connection.finished(self)
        else:
            await self._until_room()

    def write_now(self, part: bytes) -> bool:
        """Write a part of the answer's body, if this needs no wait. Returns whether it was written."""
        connection = self._connection
        if connection.is_full or not self.has_started or self.is_done or self.is_gone or len(part) > SLICE_BYTES:
            return False
        connection.transport.write(self.framing.framed(part, is_last=False))
        return True

    def _write(self, framed: bytes) -> None:
        self._start, self.has_started = None, True
        if framed:
            self._connection.transport.write(framed)

    async def _until_room(self) -> None:
        while self._connection.is_full and not self.is_gone:
            await self._wait()

    def _lead(self) -> None:
        """Write a stream's head before its first part, so that the client knows that it is being served."""
        if self._start is None or self.is_gone or self.is_done:
            return
        try:
            head = self._head(None)
        except ValueError:
            return  # the same error is raised to the application with the first part
        self._start, self.has_started = None, True
        self._connection.transport.write(head)

    def _head(self, whole_bytes: int | None) -> bytes:
        assert self._start is not None
        server = self._connection.server
        may_go_on = self.body.is_whole and not server.is_stopping
        start = self._start
        return self.framing.head(start["status"], start.get("headers", ()), whole_bytes, may_go_on, server.date)

    async def _wait(self) -> None:
        waiter = self._connection.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)


class AnswerSender:
    """The `send` of an application.
    `now` writes a part of a body without waiting (`HttpExchange.write_now`). `watched_by` reports that the client leaves, without a task that waits
    in `receive`. A `send` that wraps this one need not have them; then all parts are messages."""

    __slots__ = ("_exchange", "now", "watched_by")

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self.now, self.watched_by = exchange.write_now, exchange.watched_by

    def __call__(self, message: MutableMapping[str, Any]) -> Coroutine[Any, Any, None]:
        return self._exchange.send(message)


class RequestBody:
    """The received part of a request's body that the application has not read."""

    def __init__(self, *, expects: bool) -> None:
        self.is_whole = False
        self.expects = expects  # the client waits for 100 Continue
        self.held_bytes = 0
        self._parts: list[bytes] = []
        self._is_told = False  # the application has read the end

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.held_bytes += len(part)

    def take(self) -> bytes | None:
        """Return the bytes since the last call; None if there are none and the body has not ended."""
        if not self._parts and (self._is_told or not self.is_whole):
            return None
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.held_bytes, self._is_told = 0, self.is_whole
        return body


class ResponseFraming:
    """Marks the end of a response by a length, by chunks, or by closing the connection."""

    def __init__(self, head: RequestHead) -> None:
        self.keep_alive = head.keep_alive
        self._is_head_request = head.method == b"HEAD"
        self._version = head.version
        self._is_empty = self._is_head_request  # the response has no body
        self._is_chunked = False
        self._owed_bytes: int | None = None  # rest of the length that the head announced

    def head(self, status: int, headers: Pairs, whole_bytes: int | None, may_go_on: bool, date: bytes) -> bytes:
        """Return the bytes of a response's head.

        `whole_bytes` is the body's size if the body is complete; `may_go_on` keeps the connection open for another request. Raises ValueError.
        """
        lines: list[bytes] = []
        lengths: list[bytes] = []
        told = _lines_of(headers, lengths)
        self._is_chunked, self._is_empty = False, self._is_head_request
        if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):
            raise ValueError("an answer names its length more than once, or not by a number")
        self._owed_bytes = int(lengths[0]) if lengths else None
        if status < 200 or status in (204, 304):
            self._is_empty = True
        elif not lengths and whole_bytes is not None:
            # A response without a body to a HEAD request does not show the length.
            if whole_bytes or not self._is_head_request:
                lines.append(b"content-length: %d\r\n" % whole_bytes)
        elif not lengths and self._version == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        elif not lengths:
            self.keep_alive = False  # HTTP/1.0: the answer ends with the connection
        self.keep_alive = self.keep_alive and may_go_on
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self._version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        return b"".join((_status_line(status), told, *lines, date, b"\r\n"))

    def framed(self, body: bytes, is_last: bool) -> bytes:
        """Return a part of the body as bytes to send.
        Raises ValueError if it does not fit the announced length: further bytes would be read as the next response."""
        if self._is_empty:
            return b""
        if self._is_chunked:
            chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            return chunk + b"0\r\n\r\n" if is_last else chunk
        if self._owed_bytes is not None:
            self._owed_bytes -= len(body)
            if self._owed_bytes < 0 or (is_last and self._owed_bytes > 0):
                raise ValueError("an answer's body is not as long as its content-length says")
        return body


def response_head(status: int, headers: Pairs, *lines: bytes) -> bytes:
    """Return the head of a response.
    `lines` are whole headers with line ends. Raises ValueError for a line end inside a header."""
    return b"".join((_status_line(status), _lines_of(headers, []), *lines, b"\r\n"))


def _lines_of(headers: Pairs, lengths: list[bytes]) -> bytes:
    """Return headers as lines, and add their values of `content-length` to `lengths`.
    Raises ValueError for a line end inside a header."""
    parts: list[bytes] = []
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
        if len(name) == 14 and name.lower() == b"content-length":
            lengths.append(value)
    told = b"".join(parts)
    if not told.count(b"\r") == told.count(b"\n") == len(parts) // 4:
        raise ValueError("a header holds a line end")
    return told


@cache
def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
