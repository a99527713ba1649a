"""Client connections: HTTP/1.1 over TCP or TLS, kept for the next request, read as bytes arrive.

A connection carries one request and its response at a time. The parser is llhttp; no body is decoded, no request is repeated. This module knows
nothing of sites, of requests' meaning or of deadlines: callers limit each wait.
"""

import asyncio
import errno
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from pilotlight.support.time_limits import TimeLimit

MAX_HEAD_BYTES = 64 << 10  # limit of a response's head
# Bytes of one read. A transport by itself reads 256 KiB at once, which would be kept for each client that does not read its response.
READ_BYTES = 32 << 10
HELD_BYTES = 32 << 10  # limit of received bytes that were not taken yet; above it the socket is not read
# Time for which an idle connection is kept: less than the 75 s of sites (wire/http/listen.py). A request that crosses a site's close is sent again
# over a new connection. With 4 s, every other stream of a quiet router waited for a handshake.
KEEP_ALIVE_S = 60.0

SWITCHING_PROTOCOLS = 101


class CannotConnect(Exception):
    """No connection: there is no server at the address, or it has no valid TLS."""


class NoDescriptors(CannotConnect):
    """This process has no file descriptors left for connections."""


class ConnectionLost(Exception):
    """The connection ended, or sent invalid HTTP, before the response's end."""


class Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool
    authority: str  # host and port as in the Host header

    @classmethod
    @lru_cache(4096)  # requests to one site have the same `url`, so it is parsed once
    def of(cls, url: str) -> "Origin":
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.netloc.rpartition("@")[2])


class ResponseParser:
    """Parse the responses of one connection, one after the other, without I/O.

    llhttp parses; this class has the rules that llhttp leaves to its caller.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []  # names lower case
        self._first: dict[str, str] = {}  # the first value of each header, once the head is complete
        self.has_head = False
        self.is_done = True  # no response is in progress
        self.is_reusable = True  # the connection may carry another request
        self.is_untouched = True  # no byte of the response has arrived
        self.switched: bytes | None = None  # bytes after a 101: the connection now speaks another protocol
        self.held_bytes = 0  # bytes of the body that were not taken yet
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._ends_with_connection = False
        self.is_to_head_request = False
        self._may_switch = False

    def header(self, name: str) -> str:
        """Return the first value of a header; "" if it is missing. `name` is lower case."""
        return self._first.get(name, "")

    def expect(self, *, is_head_request: bool = False, may_switch: bool = False) -> None:
        """Begin the next response.
        A response to a HEAD request has no body; with `may_switch` the response may be a 101."""
        assert self.is_done
        self.headers, self._first, self._parts = [], {}, []
        self.has_head = self.is_done = self._ends_with_connection = False
        self.is_untouched, self.held_bytes, self._head_bytes = True, 0, 0
        self.is_to_head_request, self._may_switch = is_head_request, may_switch

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises ConnectionLost for an invalid response."""
        if self.switched is not None:
            self.switched += data
            return
        self.is_untouched = False
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._may_switch:
                raise ConnectionLost("it switched protocols without a request") from None
            self.status, self.has_head, self.is_reusable = self._parser.get_status_code(), True, False
            self.switched = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            raise ConnectionLost(f"it sent invalid HTTP: {error}") from None
        if not self.has_head and self._head_bytes > MAX_HEAD_BYTES:
            raise ConnectionLost(f"it sent headers of more than {MAX_HEAD_BYTES >> 10} KiB")

    def end(self) -> None:
        """Handle the end of the connection: the peer sends nothing more."""
        if self.has_head and self._ends_with_connection:
            self.is_done = True
        self.is_reusable = False

    def take(self) -> bytes:
        """Return the part of the body that arrived since the last call."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.held_bytes = 0
        return body

    # Methods that llhttp calls.

    def on_message_begin(self) -> None:
        if self.is_done:
            self.is_reusable = False  # a response without a request has arrived: do not reuse the connection

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:
            self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self.is_done:
            return
        status = self._parser.get_status_code()
        first = self._first = dict(reversed(self.headers))
        if status == SWITCHING_PROTOCOLS and self._may_switch:
            return
        if status < 200:
            self.headers, self._first = [], {}  # 100 Continue or 103 Early Hints: the final response follows
            return
        self.status, self.has_head = status, True
        has_end = "content-length" in first or (
            "transfer-encoding" in first
            and any(name == "transfer-encoding" and "chunked" in value.lower() for name, value in self.headers)
        )
        if self.is_to_head_request:
            self.is_reusable = False  # the parser does not know that this response has no body
            self.is_done = True
        elif not has_end and status not in (204, 304):
            self._ends_with_connection, self.is_reusable = True, False

    def on_body(self, body: bytes) -> None:
        if not self.is_done:
            self._parts.append(body)
            self.held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.has_head and not self.is_done:
            self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
            self.is_done = True


class PieceTaker(Protocol):
    """Takes a response's body piece by piece."""

    def take(self, piece: bytes, /) -> bool:
        """Take a piece; return whether the next one may come."""


class UpstreamConnection(asyncio.BufferedProtocol):
    """A connection. Use `send`, then `head`, then `read` to the end, in one task at a time."""

    def __init__(self, origin: Origin, buffer: bytearray | None = None) -> None:
        """`buffer` receives the bytes.
        They are taken out at once, so all connections of an event loop may share one buffer."""
        self.origin = origin
        self._buffer = buffer or bytearray(READ_BYTES)
        self.response = ResponseParser()
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: PieceTaker | None = None  # set while `pump` waits
        self._has_refused = False  # the taker has refused the next piece

    @property
    def is_fit(self) -> bool:
        """Tell whether another request can be sent."""
        is_free = self.response.is_done and not self._is_paused
        return is_free and self.response.is_reusable and not self._transport.is_closing()

    @property
    def transport(self) -> asyncio.Transport:
        """Return the transport, for the protocol that the connection switched to."""
        return self._transport

    def send(self, head: bytes, body: bytes, *, is_head_request: bool = False, may_switch: bool = False) -> None:
        """Send a request. Raises CannotConnect if the connection ended before anything was sent."""
        if not self.response.is_reusable:  # the connection ended before its first request
            raise CannotConnect("it closed the connection at once")
        self.response.expect(is_head_request=is_head_request, may_switch=may_switch)
        self._error = None
        if len(body) <= 1 << 16:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def head(self) -> None:
        """Wait for the response's status and headers.
        Raises ConnectionLost, and the exception given to `interrupt`."""
        while not self.response.has_head:
            await self._news()

    async def read(self) -> bytes:
        """Return received bytes of the body, at least one; empty at its end. Raises as `head` does."""
        response = self.response
        while not response.held_bytes:
            if response.is_done:
                return b""
            await self._news()
        self._resume()
        return response.take()

    async def pump(self, taker: PieceTaker) -> None:
        """Give `take` each chunk of the body until it returns False or the body ends.

        Raises as `head` does, and the exceptions of `take`. The transport calls `take`, so the waiting task is woken only at the end.
        """
        response = self.response
        self._has_refused = False
        while not self._has_refused:
            if response.held_bytes:
                self._resume()
                self._has_refused = not taker.take(response.take())
            elif response.is_done:
                return
            else:
                news = self._news()
                self._taker = taker
                try:
                    await news
                finally:
                    self._taker = None

    def _resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def interrupt(self, error: Exception) -> None:
        """Raise `error` in the current or the next wait, from another task."""
        self._error = self._error or error
        self._wake()

    def close(self) -> None:
        self.response.is_reusable = False
        self._transport.abort()

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response.is_done:
            return self.close()  # bytes without a request
        try:
            response.feed(data)
        except ConnectionLost as error:
            self._error = self._error or error
            self.close()
        if self._taker is not None and response.held_bytes and self._error is None and not self._has_refused:
            try:
                self._has_refused = not self._taker.take(response.take())
            except Exception as error:
                self._error = error
            if not (self._has_refused or response.is_done or self._error):
                return
        if (response.held_bytes > HELD_BYTES or response.switched is not None) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._error is None:
            self.response.end()
            self._wake()
        self.response.is_reusable = False

    def connection_lost(self, error: Exception | None) -> None:
        self.response.is_reusable = False
        if not self.response.is_done:
            self.interrupt(ConnectionLost(str(error) if error else "it closed the connection"))

    def _news(self) -> asyncio.Future[None]:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _connect(origin: Origin, buffer: bytearray, tls: ssl.SSLContext | None) -> UpstreamConnection:
    """Open a connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: UpstreamConnection(origin, buffer), origin.host, origin.port, ssl=tls
    )
    return connection


class ConnectionPool:
    """Connections that wait for a request, the newest first.
    Their number is not limited: admission is done by sites, and a wait here would look like round-trip time."""

    def __init__(
        self,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        connect: Callable[[Origin, bytearray, ssl.SSLContext | None], Awaitable[UpstreamConnection]] = _connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tls` has the trusted authorities; None for the system's."""
        self._connect_timeout_s = connect_timeout_s
        self._connect, self._clock = connect, clock
        self._idle: dict[Origin, deque[UpstreamConnection]] = {}
        self._open: set[UpstreamConnection] = set()
        self._buffer = bytearray(READ_BYTES)
        self._tls = tls

    @property
    def num_open(self) -> int:
        return len(self._open)

    def idle(self, origin: Origin) -> UpstreamConnection | None:
        """Return the most recently used idle connection that can be reused; None if there is none."""
        idle = self._idle.get(origin)
        now = self._clock()
        while idle:
            connection = idle.pop()
            if connection.is_fit and now - connection.idle_since < KEEP_ALIVE_S:
                return connection
            self._end(connection)
        return None

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep the connection if its response was read to the end; otherwise close it."""
        if not connection.is_fit:
            return self._end(connection)
        connection.idle_since = self._clock()
        self._idle.setdefault(connection.origin, deque()).append(connection)

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        now = self._clock()
        for origin, idle in list(self._idle.items()):
            while idle and (not idle[0].is_fit or now - idle[0].idle_since >= KEEP_ALIVE_S):
                self._end(idle.popleft())
            if not idle:
                del self._idle[origin]

    def close(self) -> None:
        for connection in tuple(self._open):
            self._end(connection)
        self._idle.clear()

    async def connect(self, origin: Origin) -> UpstreamConnection:
        """Open a connection. Raises CannotConnect, or its subclass NoDescriptors."""
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with TimeLimit(self._connect_timeout_s):
                connection = await self._connect(origin, self._buffer, self._tls if origin.is_tls else None)
        except TimeoutError:
            raise CannotConnect(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoDescriptors("the router has no file descriptors left") from None
            raise CannotConnect(f"cannot connect: {connect_reason(error)}") from None
        self._open.add(connection)
        return connection

    def give_away(self, connection: UpstreamConnection) -> None:
        """Forget a connection that has switched protocols."""
        self._open.discard(connection)

    def _end(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        connection.close()


def connect_reason(error: OSError) -> str:
    """Return the reason of a failed connection, without the site's address."""
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    if error.errno is None:  # asyncio joins the errors of several addresses in a text
        return "none of its addresses accepts a connection"
    return os.strerror(error.errno)
