"""An HTTP/1.1 server for ASGI applications, made for many long streams: one small object and no task for each connection, one task per request.

It holds clients to limits that no application can: how long a head may take and be, how long a client may leave what waits for it unread. The parser
is llhttp, so what is ambiguous (two lengths, stray line ends) is refused. HTTP/2, by ALPN or by its preface, and WebSockets are handed to others.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson

from wire.errors import ApiError, Dialect
from wire.http1_exchange import Application, Direct, Exchange
from wire.request_head import Headers, KnownHeads, Repeated, RequestHead
from wire.tunnel import Upgrading

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_PIPELINED = 64  # requests that a client may send ahead of their answers
LINGER_S = 2.0  # an answer to a body that was not read to its end must arrive before the connection is reset
SWEEP_S = 0.5
SWEPT_AT_ONCE = 256
NEVER = float("inf")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

OtherHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
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
    """`await start`, later `await stop`. Applications see ASGI 3. `others` gets connections of HTTP/2 and, without `sockets`, of WebSockets."""

    def __init__(
        self,
        app: Application,
        limits: HttpLimits | None = None,
        others: OtherHandler | None = None,
        sockets: SocketHandler | None = None,
        direct: Direct | None = None,
    ) -> None:
        self.app = app
        self.direct = direct
        self.limits = limits or HttpLimits()
        self.others = others
        self.sockets = sockets
        self.connections: set[Connection] = set()
        self.by_client: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()  # connections that were ended for a limit, by its word
        self.is_stopping = False
        self.date = b""
        self.heads = KnownHeads()
        self.name: object = None  # where it listens
        self._handed_on: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._tell_date()
        self.name = _two_of(listener.getsockname())
        self._sweeper = loop.create_task(self._sweep())
        handshake_s = None if context is None else self.limits.head_timeout_s
        self._server = await loop.create_server(
            lambda: Connection(self), sock=listener, ssl=context, ssl_handshake_timeout=handshake_s, backlog=2048
        )

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no connection any more, closes idle ones, and cuts the others after the grace; their requests have as long again to notice."""
        self.is_stopping = True
        assert self._server is not None
        assert self._sweeper is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.close_if_idle()
        deadline = time.monotonic() + grace_s
        while (self.connections or self._handed_on) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        cut = {task for connection in self.connections if (task := connection.task) is not None}
        for connection in tuple(self.connections):
            connection.abort()
        for task in tuple(self._handed_on):
            task.cancel()
        self._sweeper.cancel()
        if cut:
            _, late = await asyncio.wait(cut, timeout=grace_s)
            for task in late:
                task.cancel()
        await asyncio.gather(self._sweeper, *self._handed_on, *cut, return_exceptions=True)

    async def serve_other(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self.others is not None
        self._handed_on.add(task)
        try:
            await self.others(reader, writer)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
        finally:
            writer.close()
            self._handed_on.discard(task)

    def serve_socket(self, client: Upgrading) -> None:
        assert self.sockets is not None
        task = asyncio.get_running_loop().create_task(self.sockets(client))
        self._handed_on.add(task)
        task.add_done_callback(self._handed_on.discard)

    async def _sweep(self) -> None:
        """One clock for all connections: ten thousand idle ones cost a few milliseconds of each second, and none has a timer. They are looked at
        in small numbers, so that nobody's bytes wait for it."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._tell_date()
            connections = tuple(self.connections)
            for start in range(0, len(connections), SWEPT_AT_ONCE):
                now = time.monotonic()
                for connection in connections[start : start + SWEPT_AT_ONCE]:
                    if now > connection.deadline and connection in self.connections:
                        connection.overdue()
                await asyncio.sleep(0)

    def _tell_date(self) -> None:
        self.date = b"date: " + http_date(time.time()).encode() + b"\r\n"


class Connection(asyncio.Protocol):
    __slots__ = (
        "_around", "_client", "_exchange", "_fed_bytes", "_head_bytes", "_headers", "_in_head", "_incoming", "_is_lingering",
        "_is_paused", "_length", "_limits", "_opening", "_parser", "_refusal", "_repeated", "_server", "_unbegun", "_url", "_waiting",
        "deadline", "is_full", "loop", "transport",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = NEVER
        self.is_full = False  # what waits for the client has reached the buffer's size
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._opening: bytes | None = b""  # what may yet become HTTP/2's preface; None: it is not
        self._exchange: Exchange | None = None  # being answered
        self._incoming: Exchange | None = None  # whose body is being read
        self._unbegun: Exchange | None = None  # the application has not been told of it yet
        self._waiting: deque[Exchange] = deque()
        self._around: dict[str, Any] = {}  # what its requests' scopes tell of it
        self._headers: Headers = []  # without the body's length, which differs from request to request
        self._length: bytes | None = None
        self._url = b""
        self._head_bytes = 0  # of its whole headers
        self._fed_bytes = 0  # since it began, whole headers or not
        self._in_head = False
        self._is_paused = False
        self._is_lingering = False
        self._refusal: ApiError | None = None
        self._repeated: Repeated | None = None  # the head that came last

    # what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        server, limits = self._server, self._server.limits
        peer = _two_of(transport.get_extra_info("peername"))
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        server.connections.add(self)
        server.by_client[self._client] += 1
        self.transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self.deadline = time.monotonic() + limits.head_timeout_s
        tls = transport.get_extra_info("ssl_object")
        scheme = "http" if tls is None else "https"
        self._around = {"scheme": scheme, "client": peer, "server": server.name}
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._opening = None
            return self._hand_over(b"")
        if len(server.connections) > limits.max_connections:
            self.refuse(ApiError("overloaded", "too many connections: try again soon", retry_after_s=1))
        elif server.by_client[self._client] > limits.max_connections_per_client:
            sentence = (
                f"your address has {limits.max_connections_per_client} connections open: close some, or use them again"
            )
            self.refuse(ApiError("quota_exceeded", sentence, retry_after_s=1))

    def eof_received(self) -> None:
        """Who closes the sending half alone has left too; what is written already is still sent before the connection is closed."""
        self.deadline = time.monotonic() + self._limits.stall_s
        self._tell_gone()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        self._tell_gone()

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
                    self._hand_over(data)
                return
        is_at_start = self._incoming is None and not self._in_head and self._exchange is None
        if is_at_start and self._repeated is not None and (found := self._repeated.request_in(data)) is not None:
            self._begin(Exchange.whole(self, self._repeated.head, self._around, *found))
            return self._tell_app()
        self._parse(data)
        exchange = self._unbegun
        self._tell_app()
        if is_at_start and exchange is not None and exchange.has_all and not self._waiting:
            known = self._repeated
            if known is None or known.head is not exchange.head:
                self._repeated = Repeated.of(data, exchange.head, exchange.declared_length)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._opening = None
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._is_past_last:
                return
            self.refuse(self._refusal or ApiError("invalid_request", f"the request is not valid HTTP: {error}"))
        else:
            self._opening = None
            if self._in_head:
                self._fed_bytes += len(data)
                if self._fed_bytes > self._server.limits.max_head_bytes:
                    self.refuse(self._too_large())

    @property
    def _is_past_last(self) -> bool:
        """The newest request is whole and has asked for the connection's end: what comes behind it is nobody's, and spoils no answer."""
        newest = self._waiting[-1] if self._waiting else self._exchange
        return newest is not None and newest.has_all and not newest.head.keep_alive

    # what the parser says

    def on_message_begin(self) -> None:
        self._url, self._headers, self._length, self._head_bytes, self._fed_bytes, self._in_head = (
            b"",
            [],
            None,
            0,
            0,
            True,
        )
        if self._exchange is None:
            self.deadline = time.monotonic() + self._server.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody reads them
        name, value = name.lower(), value.strip(b" \t")  # the parser leaves what stands behind a value
        if name == b"content-length":
            self._length = value
        else:
            self._headers.append((name, value))
        self._head_bytes += len(name) + len(value)
        limits = self._server.limits
        if (
            len(self._headers) + (self._length is not None) > limits.max_headers
            or self._head_bytes > limits.max_head_bytes
        ):
            self._refusal = self._too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        head = self._whole_head()
        if not head.has_one_host:
            self._refusal = ApiError("invalid_request", "a request must have one host header")
            raise self._refusal
        if self._parser.should_upgrade():
            return  # the parser stops here
        exchange = self._incoming = Exchange(self, head, self._around, self._length)
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

    @property
    def task(self) -> asyncio.Task[None] | None:
        """That answers its request."""
        return None if self._exchange is None else self._exchange.task

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
            self.loop.call_soon(self._tell_app)  # not from within the answer before it
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
    def date(self) -> bytes:
        return self._server.date

    @property
    def is_last(self) -> bool:
        return self._server.is_stopping

    # helpers

    def _begin(self, exchange: "Exchange") -> None:
        self._exchange = self._unbegun = exchange
        self.deadline = NEVER

    def _tell_app(self) -> None:
        """Once what has come is parsed: most requests are whole then."""
        exchange, self._unbegun = self._unbegun, None
        if exchange is not None:
            exchange.begin(self._server.app, self._server.direct)

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

    def _tell_gone(self) -> None:
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.gone()
        self._waiting.clear()

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

    def _upgrade(self, rest: bytes) -> None:
        """To a WebSocket or to HTTP/2. Any other wish is passed over, as RFC 9110 (7.8) allows; `rest` came behind the head."""
        if self._parser.get_method() == b"CONNECT":
            return self.refuse(ApiError("invalid_request", "there are no tunnels here: send plain HTTP/1.1"))
        wanted = next((value.lower() for name, value in self._headers if name == b"upgrade"), b"")
        if self._may_upgrade:
            if wanted == b"websocket" and self._server.sockets is not None:
                return self._to_tunnel(rest)
            if wanted in (b"websocket", b"h2c") and self._server.others is not None:
                return self._hand_over(self._raw_head() + rest)
        self._headers = [pair for pair in self._headers if pair[0] != b"upgrade"]
        plain = self._raw_head()
        self._parser = httptools.HttpRequestParser(self)
        self._parse(plain + rest)

    @property
    def _may_upgrade(self) -> bool:
        """No answer is on its way, and no body."""
        if self._exchange is not None or self.transport.is_closing() or self._length not in (None, b"0"):
            return False
        is_get = self._parser.get_method() == b"GET"
        return is_get and not any(name == b"transfer-encoding" for name, _ in self._headers)

    def _to_tunnel(self, rest: bytes) -> None:
        self.deadline = NEVER
        head = self._whole_head()
        scope = {**head.scope, **self._around, "headers": [*head.headers]}
        self._server.serve_socket(Upgrading(scope, rest, self.transport, self._forget))

    def _hand_over(self, data: bytes) -> None:
        """`data`: all that was read of it."""
        if self._server.others is None:
            return self.refuse(ApiError("invalid_request", "HTTP/2 is not offered here"))
        self._forget()
        reader = asyncio.StreamReader(loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._server.serve_other, loop=self.loop)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if data:
            protocol.data_received(data)

    def _raw_head(self) -> bytes:
        parser = self._parser
        lines = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%s: %s" % pair for pair in self._headers]
        if self._length is not None:
            lines.append(b"content-length: " + self._length)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _whole_head(self) -> RequestHead:
        parser = self._parser
        return self._server.heads.head(
            parser.get_method(), self._url, parser.get_http_version(), self._headers, self._head_bytes
        )


def http_date(seconds: float) -> str:
    """`email.utils` has it as well, and takes 4 ms to import."""
    when = time.gmtime(seconds)
    clock = f"{when.tm_hour:02}:{when.tm_min:02}:{when.tm_sec:02}"
    return f"{DAYS[when.tm_wday]}, {when.tm_mday:02} {MONTHS[when.tm_mon - 1]} {when.tm_year} {clock} GMT"


def _two_of(address: object) -> object:
    """ASGI's host and port: IPv6 addresses of sockets have two parts more."""
    return address[:2] if isinstance(address, tuple) else address
