"""An HTTP/1.1 server for ASGI applications, made for many long streams: one small object and no task for each connection, one task per request.

It holds clients to limits that no application can: how long a head may take and be, how long a client may leave what waits for it unread. The parser
is llhttp, so what is ambiguous (two lengths, stray line ends) is refused. HTTP/2, by ALPN or by its preface, is handed to somebody else.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
import orjson

from wire.errors import ApiError, Dialect
from wire.tunnel import Upgrading

DIRECT = "pilotlight.direct"  # in the scope: the Exchange itself, for what need not wait: no task has to listen for the client's leaving

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_PIPELINED = 64  # requests that a client may send ahead of their answers
HELD_BODY_BYTES = 512 << 10  # of a body that nobody has asked for yet; beyond it the client is not read
LINGER_S = 2.0  # an answer to a body that was not read to its end must arrive before the connection is reset
SWEEP_S = 0.5
NEVER = float("inf")

Application = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]
H2Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
SocketHandler = Callable[[Upgrading], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    head_timeout_s: float = 15.0  # from its first byte, and from the connection's start to the first
    keep_alive_s: float = 75.0  # longer than any pool keeps an idle connection: the client closes first
    stall_s: float = 60.0  # for a client to take what waits for it, once its buffer is full
    write_buffer_bytes: int = 64 << 10  # full, and then the application waits; beside the kernel's own
    max_connections: int = 20_000
    max_connections_per_client: int = 20_000  # by address


class Server:
    """`await start`, later `await stop`. Applications see ASGI 3."""

    def __init__(
        self,
        app: Application,
        limits: HttpLimits | None = None,
        h2: H2Handler | None = None,
        sockets: SocketHandler | None = None,
    ) -> None:
        self.app = app
        self.limits = limits or HttpLimits()
        self.h2 = h2
        self.sockets = sockets
        self.connections: set[Connection] = set()
        self.by_client: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()  # connections that were ended for a limit, by its word
        self.is_stopping = False
        self.date = b""
        self._handed_on: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._tell_date()
        self._sweeper = loop.create_task(self._sweep())
        handshake_s = None if context is None else self.limits.head_timeout_s
        self._server = await loop.create_server(
            lambda: Connection(self), sock=listener, ssl=context, ssl_handshake_timeout=handshake_s, backlog=2048
        )

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no connection any more, closes idle ones, and cuts the others after the grace."""
        self.is_stopping = True
        assert self._server is not None
        assert self._sweeper is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.close_if_idle()
        deadline = time.monotonic() + grace_s
        while (self.connections or self._handed_on) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in tuple(self.connections):
            connection.abort()
        for task in tuple(self._handed_on):
            task.cancel()
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, *self._handed_on, return_exceptions=True)

    async def serve_h2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self.h2 is not None
        self._handed_on.add(task)
        try:
            await self.h2(reader, writer)
        finally:
            self._handed_on.discard(task)

    def serve_socket(self, client: Upgrading) -> None:
        assert self.sockets is not None
        task = asyncio.get_running_loop().create_task(self.sockets(client))
        self._handed_on.add(task)
        task.add_done_callback(self._handed_on.discard)

    async def _sweep(self) -> None:
        """One clock for all connections: ten thousand idle ones cost a millisecond of each second, and none has a timer."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._tell_date()
            now = time.monotonic()
            for connection in [connection for connection in self.connections if now > connection.deadline]:
                connection.overdue()

    def _tell_date(self) -> None:
        self.date = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"


class Connection(asyncio.Protocol):
    __slots__ = (
        "_client", "_exchange", "_fed_bytes", "_head_bytes", "_headers", "_in_head", "_incoming", "_is_lingering", "_is_paused",
        "_name", "_opening", "_parser", "_peer", "_refusal", "_scheme", "_server", "_url", "_waiting", "_wants_upgrade",
        "deadline", "is_full", "loop", "transport",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = NEVER
        self.is_full = False  # what waits for the client has reached the buffer's size
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._opening: bytes | None = b""  # what may yet become HTTP/2's preface; None: it is not
        self._exchange: Exchange | None = None  # being answered
        self._incoming: Exchange | None = None  # whose body is being read
        self._waiting: deque[Exchange] = deque()
        self._headers: list[tuple[bytes, bytes]] = []
        self._url = b""
        self._head_bytes = 0  # of its whole headers
        self._fed_bytes = 0  # since it began, whole headers or not
        self._in_head = False
        self._is_paused = False
        self._is_lingering = False
        self._wants_upgrade = False
        self._refusal: ApiError | None = None

    # what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        server, limits = self._server, self._server.limits
        self._peer, self._name = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._client = str(self._peer[0]) if isinstance(self._peer, tuple) else ""
        server.connections.add(self)
        server.by_client[self._client] += 1
        self.transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self.deadline = time.monotonic() + limits.head_timeout_s
        tls = transport.get_extra_info("ssl_object")
        self._scheme = "http" if tls is None else "https"
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._opening = None
            return self._to_h2(b"")
        if len(server.connections) > limits.max_connections:
            self.refuse(ApiError("overloaded", "too many connections: try again soon", retry_after_s=1))
        elif server.by_client[self._client] > limits.max_connections_per_client:
            sentence = (
                f"your address has {limits.max_connections_per_client} connections open: close some, or use them again"
            )
            self.refuse(ApiError("quota_exceeded", sentence, retry_after_s=1))

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.gone()
        self._waiting.clear()

    def pause_writing(self) -> None:
        self.is_full = True
        self.deadline = time.monotonic() + self._server.limits.stall_s

    def resume_writing(self) -> None:
        self.is_full = False
        self.deadline = NEVER if self._exchange is not None else time.monotonic() + self._server.limits.keep_alive_s
        if self._exchange is not None:
            self._exchange.wake()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._opening is not None:
            data = self._opening + data
            if H2_PREFACE.startswith(data[: len(H2_PREFACE)]):
                if len(data) < len(H2_PREFACE):
                    self._opening = data
                else:
                    self._to_h2(data)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._upgrade(data, upgrade.args[0])
        except httptools.HttpParserError as error:
            refusal = self._refusal or ApiError("invalid_request", f"the request is not valid HTTP: {error}")
            return self.refuse(refusal)
        self._opening = None
        if self._in_head:
            self._fed_bytes += len(data)
            if self._fed_bytes > self._server.limits.max_head_bytes:
                self.refuse(self._too_large())

    # what the parser says

    def on_message_begin(self) -> None:
        self._url, self._headers, self._head_bytes, self._fed_bytes, self._in_head = b"", [], 0, 0, True
        if self._exchange is None:
            self.deadline = time.monotonic() + self._server.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody reads them
        self._headers.append((name.lower(), value))
        self._head_bytes += len(name) + len(value)
        limits = self._server.limits
        if len(self._headers) > limits.max_headers or self._head_bytes > limits.max_head_bytes:
            self._refusal = self._too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or (hosts == 0 and self._parser.get_http_version() == "1.1"):
            self._refusal = ApiError("invalid_request", "a request must have one host header")
            raise self._refusal
        if self._parser.should_upgrade():
            self._wants_upgrade = True
            return
        exchange = self._incoming = Exchange(self, self._scope())
        if self._exchange is None:
            self._begin(exchange)
        elif len(self._waiting) < MAX_PIPELINED:
            self._waiting.append(exchange)
            self.hold_back()
        else:
            self._refusal = ApiError("invalid_request", f"more than {MAX_PIPELINED} requests ahead of their answers")
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        if self._incoming is not None:
            self._incoming.take(body)

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.end_body()
            self._incoming = None

    # what an exchange and the server say

    def finished(self, exchange: "Exchange") -> None:
        """Its answer is written."""
        if exchange is not self._exchange:
            return
        self._exchange = None
        if not exchange.has_all:
            return self._linger()
        if not exchange.keep_alive or self._server.is_stopping:
            self.deadline = time.monotonic() + self._server.limits.stall_s
            return self.transport.close()
        if self._waiting:
            self._begin(self._waiting.popleft())
        else:
            self.deadline = time.monotonic() + self._server.limits.keep_alive_s
        if len(self._waiting) <= 1:
            self.read_on()

    def refuse(self, error: ApiError) -> None:
        """Before the request's answer has begun. Of one under way, its own or that of a request before it, only the end can be withheld."""
        self._server.cut[error.word] += 1
        exchange = self._exchange
        if exchange is not None:
            if exchange.has_begun or exchange is not self._incoming:
                return self.abort()
            self._exchange = self._incoming = None
            exchange.gone()
        body = orjson.dumps(error.body(Dialect.OPENAI))
        status = error.status(Dialect.OPENAI)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        lines += [
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.headers()),
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n" + self._server.date + b"\r\n" + body)
        self._linger()

    def overdue(self) -> None:
        if self.is_full:
            self._server.cut["unread"] += 1
            self.abort()
        elif self._is_lingering or self.transport.is_closing():
            self.abort()
        elif not self._in_head and not self._opening:
            self.deadline = time.monotonic() + LINGER_S
            self.transport.close()
        else:
            seconds = self._server.limits.head_timeout_s
            self.refuse(ApiError("request_timeout", f"the request's head took more than {seconds:g} s"))

    def close_if_idle(self) -> None:
        if self._exchange is None:
            self.transport.close()

    def abort(self) -> None:
        self.deadline = NEVER
        self.transport.abort()

    def hold_back(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    @property
    def server(self) -> Server:
        return self._server

    # helpers

    def _begin(self, exchange: "Exchange") -> None:
        self._exchange = exchange
        self.deadline = NEVER
        exchange.task = self.loop.create_task(exchange.run(self._server.app))

    def _linger(self) -> None:
        """The rest of what the client sends is thrown away for a moment: closing on unread bytes would reset the answer under it."""
        self._is_lingering = True
        self.deadline = time.monotonic() + LINGER_S
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.read_on()
        else:
            self.transport.close()  # TLS cannot half-close

    def _forget(self) -> None:
        if self in self._server.connections:
            self._server.connections.discard(self)
            self._server.by_client[self._client] -= 1
            if not self._server.by_client[self._client]:
                del self._server.by_client[self._client]

    def _too_large(self) -> ApiError:
        limits = self._server.limits
        sentence = (
            f"the request's head is larger than {limits.max_head_bytes >> 10} KiB or {limits.max_headers} headers"
        )
        return ApiError("headers_too_large", sentence)

    def _upgrade(self, data: bytes, end: int) -> None:
        """To HTTP/2, and only as the first thing on a connection, or to a WebSocket, which another handler tunnels; `end` is the request's."""
        wanted = next((value.lower() for name, value in self._headers if name == b"upgrade"), b"")
        if wanted == b"h2c" and self._opening is not None and self._server.h2 is not None:
            return self._to_h2(data)
        is_alone = self._exchange is None and not self.transport.is_closing()
        if (
            wanted == b"websocket"
            and self._server.sockets is not None
            and is_alone
            and self._parser.get_method() == b"GET"
        ):
            self.deadline = NEVER
            return self._server.serve_socket(Upgrading(self._scope(), data[end:], self.transport, self._forget))
        self.refuse(ApiError("invalid_request", "only HTTP/2 and WebSockets are upgraded to: send plain HTTP/1.1"))

    def _to_h2(self, data: bytes) -> None:
        if self._server.h2 is None:
            return self.refuse(ApiError("invalid_request", "HTTP/2 is not offered here"))
        self._forget()
        reader = asyncio.StreamReader(loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._server.serve_h2, loop=self.loop)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if data:
            protocol.data_received(data)

    def _scope(self) -> dict[str, Any]:
        url = self._url
        if not url.startswith(b"/") and url != b"*":
            parts = httptools.parse_url(url)  # the absolute form, which proxies get
            url = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("latin-1"), "path": unquote(path) if "%" in path else path, "raw_path": raw_path,
            "query_string": query, "root_path": "", "headers": self._headers,
            "scheme": self._scheme, "client": self._peer, "server": self._name,
        }  # fmt: skip


class Exchange:
    """One request and its answer: the application's `receive` and `send`."""

    __slots__ = (
        "_connection", "_expects", "_held", "_is_chunked", "_is_head", "_on_gone", "_parts", "_start", "_told", "_waiter", "has_all", "has_begun",
        "is_done", "is_gone", "keep_alive", "scope", "task",
    )  # fmt: skip

    def __init__(self, connection: Connection, scope: dict[str, Any]) -> None:
        self.scope = scope
        scope[DIRECT] = self
        self.task: asyncio.Task[None] | None = None
        self.has_all = False  # of the body
        self.has_begun = self.is_done = self.is_gone = False
        self.keep_alive = scope["http_version"] == "1.1"
        self._expects = False
        for name, value in scope["headers"]:
            if name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                self.keep_alive = (self.keep_alive or b"keep-alive" in tokens) and b"close" not in tokens
            elif name == b"expect":
                self._expects = value.lower() == b"100-continue"
        self._connection = connection
        self._parts: list[bytes] = []
        self._held = 0
        self._told = False  # the application has had the whole body
        self._start: dict[str, Any] | None = None
        self._is_chunked = False
        self._is_head = scope["method"] == "HEAD"
        self._waiter: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None

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
    def is_ready(self) -> bool:
        """A further part of the answer can be written now."""
        return self.has_begun and not (self._connection.is_full or self.is_gone or self.is_done)

    def write(self, body: bytes) -> None:
        """Some of an answer that has begun, while `is_ready`."""
        if body and not self._is_head:
            self._connection.transport.write(b"%x\r\n%s\r\n" % (len(body), body) if self._is_chunked else body)

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

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, app: Application) -> None:
        try:
            await app(self.scope, self.receive, self.send)
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

    async def send(self, message: dict[str, Any]) -> None:
        if self.is_gone or self.is_done:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        head = b""
        if self._start is not None:
            head = self._head(self._start, body, is_last)
            self._start, self.has_begun = None, True
        if self._is_head:
            body = b""
        elif self._is_chunked:
            body = _chunk(body, is_last)
        if head or body:
            self._connection.transport.write(head + body)
        if is_last:
            self.is_done = True
            self._on_gone = None
            self._connection.finished(self)
            return
        while self._connection.is_full and not self.is_gone:
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _head(self, start: dict[str, Any], body: bytes, is_last: bool) -> bytes:
        status: int = start["status"]
        parts = [_status_line(status)]
        has_length = False
        for name, value in start["headers"]:
            has_length = has_length or name == b"content-length"
            parts += (name, b": ", value, b"\r\n")
        if not has_length and status >= 200 and status not in (204, 304):
            if is_last:
                parts.append(b"content-length: %d\r\n" % len(body))
            elif self.scope["http_version"] == "1.1":
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # HTTP/1.0: the end of the connection is the end of the answer
        if not self.has_all:
            self.keep_alive = False
        if not self.keep_alive or self._connection.server.is_stopping:
            parts.append(b"connection: close\r\n")
        elif self.scope["http_version"] == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        parts.append(self._connection.server.date)
        head = b"".join(parts)
        if head.count(b"\n") != head.count(b"\r\n") or head.count(b"\n") > len(start["headers"]) + 4:
            raise ValueError("a header's value holds a line end")
        return head + b"\r\n"


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
