"""Connections to sites: HTTP/1.1 over TCP or TLS, kept for the next request, read as bytes come.

A link is one connection and the one answer under way on it. The parser is llhttp; nothing is decoded, nothing is tried again. Knows no sites, no
requests' meaning and no deadlines: who waits, bounds the wait.
"""

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES = 64 << 10  # of an answer
HELD_BYTES = 256 << 10  # of an answer that nobody has read yet; beyond it the site is not read
# Sites keep idle connections for 75 s (wire/http/listen.py). Where one closes sooner, the link is known to be closed, or the request that crossed the
# close is sent again over a new one. With four seconds every other stream of a quiet router waited for a handshake before its first token.
KEEP_ALIVE_S = 60.0


class CannotConnect(Exception):
    """There is nobody at that address, or nobody that speaks TLS as it should."""


class NoDescriptors(CannotConnect):
    """This process may open no further connection, to whomever."""


class LinkLost(Exception):
    """The connection ended, or what came over it is not HTTP, before the answer's end."""


class Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool
    authority: str  # as the host header says it

    @classmethod
    def of(cls, url: str) -> "Origin":
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.netloc.rpartition("@")[2])


class Link(asyncio.Protocol):
    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.status = 0
        self.headers: list[tuple[str, str]] = []  # names lower case
        self.has_head = False
        self.is_done = True  # nothing is under way
        self.is_fit = True  # for another request
        self.idle_since = 0.0
        self.sink: Callable[[bytes], None] | None = (
            None  # given the body's parts by whoever brings them, while somebody waits for news
        )
        self.plain: Callable[[bytes], bool] | None = None  # shown a read that begins with a chunk before the parser is
        self.begun: Callable[[], None] | None = (
            None  # called, once the head is here, with whatever comes, instead of waking whoever waits
        )
        self.on_wake: Callable[[], None] | None = None  # called once where there is news, and nobody waits yet
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._held = 0
        self._head_bytes = 0
        self._is_between_chunks = False  # if what was fed last ends with a line
        self._is_paused = False
        self._ends_with_connection = False
        self.is_head_request = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, head: bytes, body: bytes, *, is_head_request: bool = False) -> None:
        """Raises CannotConnect: nothing was sent."""
        assert self.is_done
        if not self.is_fit:  # between the connection and its first request
            raise CannotConnect(f"{self.origin.authority} closed the connection at once")
        self.headers, self._parts = [], []
        self._error = self.sink = self.plain = self.begun = self.on_wake = None
        self.has_head = self.is_done = False
        self._held = self._head_bytes = 0
        self.is_head_request = is_head_request
        self._ends_with_connection = self._is_between_chunks = False
        if len(body) <= 1 << 16:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def head(self) -> None:
        """`status` and `headers` are there. Raises LinkLost."""
        while not self.has_head:
            await self.news()

    async def read(self) -> bytes:
        """What has come, at least a byte; empty at the answer's end. Raises LinkLost."""
        while not self._parts:
            if self.is_done:
                return b""
            await self.news()
        return self.take()

    def take(self) -> bytes:
        """What has come and been given to no sink."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
        return body

    @property
    def is_untouched(self) -> bool:
        """Nothing of an answer has come."""
        return not self._head_bytes

    @property
    def has_news(self) -> bool:
        """`read` will not wait."""
        return bool(self._parts) or self.is_done

    @property
    def has_parts(self) -> bool:
        return bool(self._parts)

    async def news(self) -> None:
        """Until more has come, or the end, or `wake`. Raises LinkLost where nothing can come any more, and what `fail` was given."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def _may_sink(self) -> bool:
        """All before it has been taken, and somebody waits for more."""
        return not self._parts and self._waiter is not None and not self._waiter.done()

    def wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self.on_wake is not None:
            callback, self.on_wake = self.on_wake, None
            callback()

    def fail(self, error: Exception) -> None:
        """Ends the wait of whoever waits, from outside."""
        self._error = self._error or error
        self.wake()

    def close(self) -> None:
        self.is_fit = False
        self._transport.abort()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    # what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._is_between_chunks and self._may_sink and self.plain is not None and self.plain(data):
            return  # the parser stood before a chunk, and would stand behind it
        if self.is_done:
            return self.close()  # nobody has asked for anything
        self._is_between_chunks = False
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lost(f"it sent what is not HTTP: {error}")
        if not self.has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._lost(f"it sent a head of more than {MAX_HEAD_BYTES >> 10} KiB")
        if self._is_between_chunks:
            self._is_between_chunks = data.endswith(b"\n")  # else the next one's size has begun
        if self.begun is not None and self.has_head and self._error is None:
            self.begun()

    def eof_received(self) -> None:
        if self.has_head and self._ends_with_connection and self._error is None:
            self._complete()
        self.is_fit = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_fit = False
        if not self.is_done:
            self._error = self._error or LinkLost(str(error) if error else "it closed the connection")
            self.wake()

    # what the parser says

    def on_message_begin(self) -> None:
        if self.is_done:
            self.is_fit = False  # a second answer behind the one that was asked for: the next request must not have it

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:
            self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self.is_done:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []  # 100 Continue, 103 Early Hints: the answer is still to come
            return
        self.status, self.has_head = status, True
        has_end = False
        for name, value in self.headers:
            has_end = (
                has_end or name == "content-length" or (name == "transfer-encoding" and "chunked" in value.lower())
            )
        if self.is_head_request:
            self.is_fit = False  # the parser cannot be told that no body follows
            self._complete()
        elif not has_end and status not in (204, 304):
            self._ends_with_connection, self.is_fit = True, False
        if self.begun is None:
            self.wake()

    def on_body(self, body: bytes) -> None:
        if self.is_done:
            return
        if self.sink is not None and self._may_sink:
            return self.sink(body)
        self._parts.append(body)
        self._held += len(body)
        if self._held > HELD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self.begun is None:
            self.wake()

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        self._is_between_chunks = False
        if self.has_head and not self.is_done:
            self.is_fit = self.is_fit and self._parser.should_keep_alive()
            self._complete()

    def _complete(self) -> None:
        self.is_done = True
        self.wake()

    def _lost(self, why: str) -> None:
        self._error = self._error or LinkLost(why)
        self.close()
        self.wake()


AnyLink = TypeVar("AnyLink", bound=Link)


class LinkPool:
    """Links that wait for a request, newest first. No limit: admission is the sites' business, and a wait for a link would hide in the RTT."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, deque[Link]] = {}
        self._open: set[Link] = set()
        self._tls: ssl.SSLContext | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def idle(self, origin: Origin) -> Link | None:
        """The one that was used last."""
        idle = self._idle.get(origin)
        now = time.monotonic()
        while idle:
            link = idle.pop()
            if link.is_fit and not link.is_closing and now - link.idle_since < KEEP_ALIVE_S:
                return link
            self._end(link)
        return None

    def put_back(self, link: Link) -> None:
        """One whose answer was read to its end is kept, any other closed."""
        if not (link.is_done and link.is_fit) or link.is_closing:
            return self._end(link)
        link.idle_since = time.monotonic()
        self._idle.setdefault(link.origin, deque()).append(link)

    def sweep(self) -> None:
        """Closes those that have waited too long."""
        now = time.monotonic()
        for origin, idle in list(self._idle.items()):
            while idle and (not idle[0].is_fit or now - idle[0].idle_since >= KEEP_ALIVE_S):
                self._end(idle.popleft())
            if not idle:
                del self._idle[origin]

    def close(self) -> None:
        for link in tuple(self._open):
            self._end(link)
        self._idle.clear()

    async def connect(self, origin: Origin, make: Callable[[Origin], AnyLink]) -> AnyLink:
        """Raises CannotConnect."""
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: make(origin), origin.host, origin.port, ssl=self._tls if origin.is_tls else None
                )
        except TimeoutError:
            raise CannotConnect(
                f"{origin.authority} did not take the connection within {self._connect_timeout_s:g} s"
            ) from None
        except (OSError, ssl.SSLError) as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoDescriptors("the router has no file descriptors left") from None
            raise CannotConnect(f"cannot connect to {origin.authority}: {error.strerror or error}") from None
        self._open.add(link)
        return link

    def give_away(self, link: Link) -> None:
        """Its connection is somebody else's from now on."""
        self._open.discard(link)

    def _end(self, link: Link) -> None:
        self._open.discard(link)
        link.close()
