"""A client's connection to our HTTP/1.1 server: parses bytes, starts exchanges, enforces limits.

One small object and no task: the transport, its exchanges and the server's clock call it. It keeps pipelined requests in order and sends refusals.
Requests are read in request.py, responses written in exchange.py, WebSockets handled in websocket.py.
"""

import asyncio
import importlib
import socket
import sys
import time
from asyncio.trsock import TransportSocket
from collections import Counter, deque
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import orjson

from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.exchange import Application, HttpExchange, ServerState, response_head
from pilotlight.wire.http.request import (
    MAX_PIPELINED,
    BodyPart,
    Ended,
    Headers,
    Refused,
    RequestEvent,
    RequestReader,
    RequestStarted,
    WebSocketAsked,
)
from pilotlight.wire.http.request_starts import RequestStarts

if TYPE_CHECKING:
    from pilotlight.wire.http.websocket import WebSocket


# events handled in one turn of the event loop: a transport may read two megabytes of one-byte chunks at once
EVENTS_AT_ONCE = 256
EARLY_BYTES = 64 << 10  # bytes that a client may send before its WebSocket handshake is answered
UNSENT_BYTES = 64 << 10  # limit of a connection's unsent bytes in the kernel
# time for a client to receive a response if the body of its request was not read to the end; then the connection is reset
LINGER_S = 2.0
NEVER = float("inf")
# Linux's TCP_CLOSE and TCP_CLOSE_WAIT (include/net/tcp_states.h), as the first byte of its struct tcp_info
LEFT = (b"\x07", b"\x08")


class HttpLimits(NamedTuple):
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    head_timeout_s: float = 15.0  # limit of a head, and of the time until the connection's first head begins
    keep_alive_s: float = 75.0  # idle connections are kept longer than in clients' pools, so that clients close first
    stall_s: float = 60.0  # time for a client to read after its buffer became full
    write_buffer_bytes: int = 64 << 10  # unsent bytes above which the application waits, without the kernel's buffer
    max_message_bytes: int = 32 << 20  # limit of a WebSocket's message
    close_s: float = 1.0  # wait for the peer's answer to the close of a WebSocket
    # limit of the bytes of all answers that clients have not read yet; the limit for one client address is a quarter of it
    max_unread_bytes: int = 256 << 20
    max_connections: int = 20_000
    max_connections_per_client: int = 20_000  # per client address
    sweep_s: float = 0.5  # interval between checks of all connections
    # lateness of a check after which this process was stopped; clients that slow it down are not spared
    stopped_s: float = 2.0
    # once answers have had more unread bytes than this, memory is returned to the system when a quarter of them is left
    given_back_bytes: int = 4 << 20


class ConnectionServer(ServerState, Protocol):
    """The part of a server that its connections use."""

    app: Application
    limits: HttpLimits
    overload_headers: tuple[tuple[str, str], ...]  # headers of a refusal for too many connections
    cut: Counter[str]  # connections that were ended for a limit, by the limit's name
    starts: RequestStarts
    name: object  # the listener's address

    def admit(self, connection: "HttpConnection", client: str, /) -> ApiError | None: ...

    def forget(self, connection: "HttpConnection", client: str, /) -> None: ...


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "_around", "_context", "_early", "_exchanges", "_incoming", "_is_lingering", "_is_new", "_is_paused", "_reader",
        "client", "deadline", "is_full", "loop", "server", "transport",
    )  # fmt: skip

    def __init__(self, server: ConnectionServer) -> None:
        self.deadline = NEVER
        self.is_full = False  # the write buffer has reached its limit
        self._is_new = True  # no request has been answered
        self.server = server
        self._reader = RequestReader(server.limits.max_head_bytes, server.limits.max_headers)
        self._exchanges: deque[HttpExchange] = deque()  # the first one is being answered
        self._incoming: HttpExchange | None = None  # the exchange whose body is being read
        self._around: dict[str, Any] = {}  # fields that all scopes of this connection have
        self._early: bytearray | None = None  # bytes received after a WebSocket's handshake, before it is answered
        self._is_paused = False
        self._is_lingering = False

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.loop = asyncio.get_running_loop()
        self._context = copy_context()
        self.transport = cast(asyncio.Transport, transport)
        server, limits = self.server, self.server.limits
        peer = host_and_port(transport.get_extra_info("peername"))
        self.client = str(peer[0]) if isinstance(peer, tuple) else ""
        bound_unsent(transport.get_extra_info("socket"))
        refusal = server.admit(self, self.client)
        self.transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self.deadline = time.monotonic() + limits.head_timeout_s
        scheme = "http" if transport.get_extra_info("ssl_object") is None else "https"
        self._around = {"scheme": scheme, "client": peer, "server": server.name}
        if refusal is not None:
            self.refuse(refusal)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._early is not None:
            self._early += data
            return self.pause_reading() if len(self._early) > EARLY_BYTES else None
        was_in_head = self._reader.is_in_head
        idle = not self._exchanges
        events = self._reader.feed(data, len(self._exchanges))
        for event in events:
            self._take(event)
        if len(events) > EVENTS_AT_ONCE and not self._is_paused:
            self.pause_reading()
            self.loop.call_soon(self.resume_reading)
        if idle and self._exchanges:  # started after all bytes are parsed, because most requests are complete then
            self._begin()
        elif not self._exchanges and self._reader.is_in_head and not was_in_head:
            self._has(self.server.limits.head_timeout_s)

    def eof_received(self) -> None:
        """Treat the client as gone even if it closes only its sending half; written bytes are still sent."""
        self.deadline = time.monotonic() + self.server.limits.stall_s
        self._tell_gone()

    def connection_lost(self, error: Exception | None) -> None:
        self.server.forget(self, self.client)
        self._tell_gone()
        # Without these references a closed connection needs no garbage collection.
        self._reader.close()
        self._incoming = None

    def pause_writing(self) -> None:
        self.is_full = True
        self.deadline = time.monotonic() + self.server.limits.stall_s

    def resume_writing(self) -> None:
        self.is_full = False
        limits = self.server.limits
        if self._exchanges:
            self.deadline = NEVER
            self._exchanges[0].wake()
        elif self._is_lingering:
            self._has(LINGER_S)
        else:
            self._has(limits.stall_s if self.transport.is_closing() else limits.keep_alive_s)

    # Methods that the reader calls.

    def _take(self, event: RequestEvent) -> None:
        match event:
            case RequestStarted():
                self._incoming = HttpExchange(self, event.head, self._around)
                self._exchanges.append(self._incoming)
                if len(self._exchanges) > 1:
                    self.pause_reading()
            case BodyPart():
                if self._incoming is not None:
                    self._incoming.take(event.data)
            case Ended():
                if self._incoming is not None:
                    self._incoming.end_body()
                    self._incoming = None
            case WebSocketAsked():
                exchange = HttpExchange(self, event.head, self._around)
                exchange.end_body()
                exchange.framing.keep_alive = False
                self._exchanges.append(exchange)
                self._early = bytearray(event.rest)
            case Refused():
                newest = self._exchanges[-1] if self._exchanges else None
                if newest is not None and newest.body.is_whole and len(self._exchanges) <= MAX_PIPELINED:
                    newest.framing.keep_alive = False  # bytes after it are not a valid request
                else:
                    self.refuse(event.error)

    def _begin(self) -> None:
        self._has(NEVER)
        self.server.starts.add(self.loop, self._begin_now)

    def _begin_now(self) -> None:
        if not self._exchanges:
            return  # its request was refused while it waited
        exchange, early = self._exchanges[0], self._early
        # A request without a body costs little, so it is answered even if the client has closed its sending half.
        may_have_left = self._is_new and exchange.body.held_bytes
        if exchange.is_gone or (may_have_left and has_left(self.transport.get_extra_info("socket"))):
            self._exchanges.clear()
            self._has(self.server.limits.stall_s)
            return self.transport.close()
        exchange.begin(self.server.app if early is None else _websocket_app(self, exchange, early))

    # Methods that exchanges and the server call.

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Return the task that answers the current request; None between requests."""
        return self._exchanges[0].task if self._exchanges else None

    def finished(self, exchange: HttpExchange) -> None:
        """Start the next request, or wait for one: the response of `exchange` is written."""
        if not self._exchanges or exchange is not self._exchanges[0]:
            return
        self._exchanges.popleft()
        self._is_new = False
        if not exchange.body.is_whole:
            return self._linger()
        if not exchange.framing.keep_alive or self.server.is_stopping:
            self._has(self.server.limits.stall_s)
            return self.transport.close()
        if self._exchanges:
            # Later and in the connection's context, not within the previous answer, whose variables are those of its request.
            self.loop.call_soon(self._begin_next, context=self._context)
        else:
            self._has(self.server.limits.keep_alive_s)
        if self._is_paused and len(self._exchanges) <= 2:
            self.resume_reading()

    def forget(self, exchange: HttpExchange) -> None:
        """Drop an exchange whose client has left and whose task ends."""
        if self._exchanges and exchange is self._exchanges[0]:
            self._exchanges.popleft()

    def _begin_next(self) -> None:
        if self._exchanges and self._exchanges[0].task is None:
            self._begin()

    def refuse(self, error: ApiError) -> None:
        """Refuse the request if its response has not started.
        If a response is in progress, to this or to an earlier request, end the connection without completing it."""
        server = self.server
        server.cut[error.word] += 1
        if self._exchanges:
            exchange = self._exchanges[0]
            if exchange.has_started or exchange is not self._incoming:
                return self.abort()
            self._exchanges.clear()
            self._incoming = None
            exchange.gone()
        body = orjson.dumps(error.body(Dialect.OPENAI))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), *error.headers()]
        if error.word in ("overloaded", "quota_exceeded"):
            headers += server.overload_headers
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        status = error.status(Dialect.OPENAI)
        self.transport.write(response_head(status, raw, b"connection: close\r\n", server.date) + body)
        self._linger()

    def overdue(self) -> None:
        if self.is_full:
            self.server.cut["unread"] += 1
            self.abort()
        elif self._is_lingering or self.transport.is_closing():
            self.abort()
        elif not self._reader.is_in_head:
            self.deadline = time.monotonic() + LINGER_S
            self.transport.close()
        else:
            seconds = self.server.limits.head_timeout_s
            self.refuse(ApiError("request_timeout", f"the request's head took more than {seconds:g} s"))

    def close_if_idle(self) -> None:
        if not self._exchanges:
            self.transport.close()

    def abort(self) -> None:
        self.deadline = NEVER
        self.transport.abort()

    def pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def _linger(self) -> None:
        """Discard the client's remaining bytes for a moment.
        If unread bytes are left at the close, the connection is reset and the answer may be lost."""
        self._is_lingering = True
        self._has(LINGER_S)
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.resume_reading()
        else:
            self.transport.close()  # TLS has no half-close

    def _has(self, seconds: float) -> None:
        """Give the client `seconds` from now, unless it does not read its answers.
        A client that does not read gets no more time by sending requests."""
        if not self.is_full:
            self.deadline = time.monotonic() + seconds

    def _tell_gone(self) -> None:
        for exchange in tuple(self._exchanges):
            exchange.gone()
        while len(self._exchanges) > 1:
            self._exchanges.pop()


def _websocket_app(connection: HttpConnection, exchange: HttpExchange, early: bytearray) -> Application:
    """Return an application for a request that asks for a WebSocket.
    Until it is lost, the connection stays counted and does not answer other requests."""

    def open_websocket(headers: Headers) -> "WebSocket":
        from pilotlight.wire.http.websocket import SocketTimings, WebSocket

        exchange.switched(headers)
        return WebSocket(
            connection.transport,
            is_client=False,
            early=bytes(early),
            max_message_bytes=connection.server.limits.max_message_bytes,
            on_lost=lambda: connection.connection_lost(None),
            timings=SocketTimings(close_s=connection.server.limits.close_s),
        )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # the import takes 40 ms, and most processes never have a WebSocket
        if "pilotlight.wire.http.websocket_handshake" not in sys.modules:
            await asyncio.to_thread(importlib.import_module, "pilotlight.wire.http.websocket_handshake")
        from pilotlight.wire.http.websocket_handshake import PendingUpgrade

        await PendingUpgrade(connection.server.app, open_websocket)(scope, receive, send)

    return app


def has_left(sock: "socket.socket | TransportSocket | None") -> bool:
    """Ask the kernel whether a client has closed its connection.

    uvloop accepts one connection in each turn and starts its first request before it reads again. Otherwise, after clients have left at once, the
    requests of all that were not accepted yet would be computed.
    """
    return tcp_info(sock, 1) in LEFT


def tcp_info(sock: "socket.socket | TransportSocket | None", num_bytes: int) -> bytes:
    """Return the first bytes of Linux's struct tcp_info; empty on other systems and for other connections."""
    if sock is None or sys.platform != "linux":
        return b""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, num_bytes)
    except OSError:  # not a TCP connection, or a closed one
        return b""


def bound_unsent(sock: "socket.socket | TransportSocket | None") -> None:
    """Limit the bytes in the kernel that are not sent yet.

    For a client that does not read they would grow to megabytes. Sockets of uvloop are not TransportSockets.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # the connection may have ended
            sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


def host_and_port(address: object) -> object:
    """Return the address in ASGI's form, (host, port): socket addresses of IPv6 have two more parts."""
    return address[:2] if isinstance(address, tuple) else address
