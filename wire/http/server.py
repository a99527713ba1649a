"""An HTTP/1.1 server for ASGI applications with many long streams.

Each connection is one small object without a task, and each request is one task.

It enforces limits that an application cannot: the number of connections, the size and duration of a request's head, and how long a client may leave
its answer unread. A single connection is handled in connection.py.
"""

import asyncio
import socket
import ssl
import struct
import time
from asyncio.trsock import TransportSocket
from collections import Counter
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import partial

from pilotlight.support import background
from pilotlight.support.time_limits import Pauses
from pilotlight.wire.errors import ApiError
from pilotlight.wire.http.connection import HttpConnection, HttpLimits, host_and_port, tcp_info
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.http.request_starts import RequestStarts

SWEPT_AT_ONCE = 256
REFUSED_AT_ONCE = 16  # connections above the limit that get an error response; more are closed at once
# A client is gone if it does not acknowledge sent bytes for this time. A client that only does not read still acknowledges, and even with a loss of
# one in three packets an acknowledgement arrives within this time.
SILENT_MS = 15_000

# Linux's struct tcp_info (include/uapi/linux/tcp.h): small fields of eight bytes in total, then 32-bit numbers.
_UNACKED, _LAST_ACK_RECV, _SIZE = 24, 56, 60
_UINT = struct.Struct("=I")


class Server:
    """An HTTP server: `await start`, later `await stop`. Applications see ASGI 3, but no `lifespan`."""

    def __init__(
        self,
        app: Application,
        limits: HttpLimits | None = None,
        overload_headers: Iterable[tuple[str, str]] = (),
        wall_clock: Callable[[], float] = time.time,
        give_back: Callable[[], None] | None = None,
        has_vanished: "Callable[[socket.socket | TransportSocket | None], bool] | None" = None,
    ) -> None:
        """`overload_headers` are added to a refusal for too many connections.

        `give_back` returns freed memory to the system; `has_vanished` tells whether a connection's client is gone.
        """
        self.app = app
        self.limits = limits or HttpLimits()
        self.overload_headers = tuple(overload_headers)
        self._wall_clock = wall_clock
        self._give_back, self._has_vanished = give_back or give_back_memory, has_vanished or client_has_vanished
        self.connections: set[HttpConnection] = set()
        self.by_client: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()  # connections that were ended for a limit, by the limit's name
        self.starts = RequestStarts()
        self.is_stopping = False
        self.date = b""  # the whole line of the Date header
        self.name: object = None  # the listener's address
        self._most_unread = 0  # highest number of unread bytes since memory was last given back
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._tell_date()
        self.name = host_and_port(listener.getsockname())
        self._sweeper = background.start(self._sweep, "the time limits of connections")
        handshake_s = None if context is None else self.limits.head_timeout_s
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(lambda: HttpConnection(self), sock=listener)
            return
        self._server = await loop.create_server(
            lambda: HttpConnection(self), sock=listener, ssl=context, ssl_handshake_timeout=handshake_s, backlog=2048
        )

    def retire(self) -> None:
        """Accept no more connections, and close each one after its current or next answer."""
        self.is_stopping = True
        assert self._server is not None
        self._server.close()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Accept no more connections, close idle ones, and cut the others after the grace period.

        Their requests then have the same time to end.
        """
        self.is_stopping = True
        assert self._server is not None
        assert self._sweeper is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.close_if_idle()
        deadline = time.monotonic() + grace_s
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        cut = {task for connection in self.connections if (task := connection.task) is not None}
        for connection in tuple(self.connections):
            connection.abort()
        await background.stop(self._sweeper)
        if cut:
            _, late = await asyncio.wait(cut, timeout=grace_s)
            for task in late:
                task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)

    def admit(self, connection: HttpConnection, client: str) -> ApiError | None:
        """Count a connection; return an error to refuse it, or None.
        Call `forget` in any case, also for one that is refused or closed here."""
        limits = self.limits
        self.connections.add(connection)
        self.by_client[client] += 1
        excess = len(self.connections) - limits.max_connections
        excess_of_client = self.by_client[client] - limits.max_connections_per_client
        if max(excess, excess_of_client) > REFUSED_AT_ONCE:
            self.cut["closed"] += 1
            connection.abort()  # its file descriptor is needed for other clients or for a connection to a site
        elif excess > 0:
            return ApiError("overloaded", "too many connections: try again soon", retry_after_s=1)
        elif excess_of_client > 0:
            most = limits.max_connections_per_client
            sentence = f"your address has {most} connections open: close or reuse some"
            return ApiError("quota_exceeded", sentence, retry_after_s=1)
        return None

    def forget(self, connection: HttpConnection, client: str) -> None:
        """Stop counting a connection.
        A second call has no effect; it happens if a connection is lost after another protocol took it over."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]

    async def _sweep(self) -> None:
        """Check all connections with one clock, in small groups, so that other work is not delayed.

        Checking ten thousand idle ones takes a few milliseconds of each second, and no connection needs a timer.
        """
        limits, pauses = self.limits, Pauses(self.limits.sweep_s, self.limits.stopped_s)
        pauses.check(time.monotonic())
        while True:
            await asyncio.sleep(limits.sweep_s)
            self._tell_date()
            connections = tuple(self.connections)
            for start in range(0, len(connections), SWEPT_AT_ONCE):
                due, now = connections[start : start + SWEPT_AT_ONCE], time.monotonic()
                pauses.check(now)
                if now - pauses.ended_at < limits.head_timeout_s:
                    continue  # no client could be heard while this process was stopped
                background.for_each(due, partial(self._look, now), "the time limits of one connection")
                await asyncio.sleep(0)
            self._bound_unread()

    def _bound_unread(self) -> None:
        """Close the connections whose answers were unread for longest if all of them hold too many bytes."""
        most, total, by_client = self.limits.max_unread_bytes, 0, Counter[str]()
        full = sorted((each for each in self.connections if each.is_full), key=lambda each: each.deadline, reverse=True)
        for connection in full:
            size = connection.transport.get_write_buffer_size()
            if total + size > most or by_client[connection.client] + size > most / 4:
                self.cut["unread"] += 1
                connection.abort()
            else:
                total += size
                by_client[connection.client] += size
        self._most_unread = max(self._most_unread, total)
        if self._most_unread > self.limits.given_back_bytes and total < self._most_unread / 4:
            self._most_unread = total
            self._give_back()

    def _look(self, now: float, connection: HttpConnection) -> None:
        if connection not in self.connections:
            return  # it was lost while others were checked
        if now > connection.deadline:
            connection.overdue()
        elif connection.task is not None and self._has_vanished(connection.transport.get_extra_info("socket")):
            self.cut["vanished"] += 1
            connection.abort()  # stop computing an answer without a client

    def _tell_date(self) -> None:
        self.date = b"date: " + formatdate(self._wall_clock(), usegmt=True).encode() + b"\r\n"


def give_back_memory(library: object = None) -> None:
    """Return freed memory to the system, which takes milliseconds.
    Otherwise glibc keeps the memory of thousands of unread answers. `library`: the C library, the process's own by default."""
    import ctypes  # the import takes 10 ms, and most processes never have that many unread bytes

    trim = getattr(library or ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def client_has_vanished(sock: "socket.socket | TransportSocket | None", silent_ms: int = SILENT_MS) -> bool:
    """Ask the kernel whether a client is gone; return False on systems other than Linux.

    Writing does not show it while the kernel's buffers accept bytes.
    """
    return is_silent(tcp_info(sock, _SIZE), silent_ms)


def is_silent(info: bytes, silent_ms: int = SILENT_MS) -> bool:
    if len(info) < _SIZE:
        return False
    (unacked,), (last_ack_ms,) = _UINT.unpack_from(info, _UNACKED), _UINT.unpack_from(info, _LAST_ACK_RECV)
    return bool(unacked and last_ack_ms > silent_ms)
