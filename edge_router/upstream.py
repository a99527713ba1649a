"""Sites' answers: what has begun, its events as they come, and the watch over those that fall silent.

An answer is made once there is something to pass on (asking.py). `Answer.batches` raises Lost where its stream ends before its end. Knows HTTP and
framing; choosing, retrying and telling the client are proxy.py's.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import aiohttp
import orjson

from edge_router.link import KEEP_ALIVE_S, Link, LinkLost, LinkPool, Origin
from edge_router.peek import ValidRequest
from edge_router.plain import PlainEvent
from edge_router.site_clocks import SiteClocks
from sites.network import RelayConfig
from wire.continuation import MARKS
from wire.headers import SITE, forwardable
from wire.sse import Event, EventDecoder, SSEError

Failure = Literal[
    "connect",
    "lost",
    "silent",
    "full",
    "draining",
    "malformed",
    "refused",
    "declined",
    "no_model",
    "untrusted",
    "no_files",
]
Cause = Literal["closed", "silent", "frozen", "stalled", "error", "draining", "malformed"]

PassedOn = Callable[
    [list[Event]], list[Event] | None
]  # what is left to do of some events: None: nothing, not even to look at them
PlainOn = Callable[[PlainEvent], bool]  # False: it has to be looked at, as others are

LOOK_AGAIN_S = 0.5  # silence inside a stream, after which the site's probes are asked whether it still lives
LOOKED_AT_ONCE = 64  # silent streams; each costs up to a microsecond when it is no longer in the processor's caches
LAST_CHUNK_S = 0.5  # after the last event, the end of the HTTP body: then the connection can be used again
WORKERS_AI_FULL = 3040
ENGINE_LOST = ("engine_error", 5000)  # in either dialect: the engine died or failed
MODEL_LOST = "model_load_failed"  # another site may have it whole, or room for it
SITES_OWN_FAULT = (
    *ENGINE_LOST,
    MODEL_LOST,
    "internal_error",
    "draining",
    "overloaded",
    WORKERS_AI_FULL,
)  # as an error event
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
NOT_THE_LAST = Event(
    b"", None, None, b""
)  # stands for one that was passed on unread, behind which there is more to come
OUR_OWN_HEADERS = frozenset({"server", "date"})  # our server writes its own


class SiteFailed(Exception):
    """This site did not answer: nothing of the answer came from it."""

    def __init__(self, kind: Failure, detail: str, retry_after_s: float | None = None, queued_tokens: int = 0) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.queued_tokens = queued_tokens  # of a site that declines: how long its queue is


class Lost(Exception):
    """The site stopped in the middle of its stream."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def connector() -> aiohttp.TCPConnector:
    """For probes."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=60)


def client_session(
    tcp: aiohttp.BaseConnector, relay: RelayConfig, *traces: aiohttp.TraceConfig
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=tcp,
        connector_owner=False,
        auto_decompress=False,  # what the site encoded is the client's to decode
        skip_auto_headers=("user-agent", "accept", "content-type"),
        cookie_jar=aiohttp.DummyCookieJar(),  # clients' cookies are not ours to keep
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=relay.connect_timeout_s
        ),  # the default total cuts streams at 300 s
        trace_configs=list(traces),
    )


class Answer:
    """A site's answer, begun. `async with` it: leaving closes the connection to a site that is still talking."""

    def __init__(
        self, upstream: "Upstream", link: Link, body: bytes | None, stream: "Events | None", first: list[Event]
    ) -> None:
        self.status = link.status
        self.headers = _downstream_headers(link, body)
        self.body = body  # None: a stream
        self.has_marks = body is None and header(link.headers, MARKS) == "1"  # it can be continued elsewhere
        self.is_opaque = isinstance(
            stream, _Pieces
        )  # a function's: what is in it, and how it ends, is not ours to judge
        self._upstream = upstream
        self._link = link
        self.first = first  # its first events
        self.is_told = False  # the client has them
        self._stream = stream

    @property
    def completion_tokens(self) -> int:
        """As the usage of an answer in one piece has it, at its end."""
        found = _COMPLETION_TOKENS.search(self.body[-2048:]) if self.body is not None else None
        return int(found[1]) if found is not None else 0

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._upstream.leave(self._link, self._stream)

    async def batches(
        self, is_frozen: Callable[[], bool], is_stalled: Callable[[float], bool], passed_on: PassedOn, plain_on: PlainOn
    ) -> AsyncGenerator[list[Event], None]:
        """Whole events, as many at once as one read delivered; those that `plain_on` and `passed_on` leave of what comes while they are waited for,
        which may be none. Raises Lost where the stream ends without having said so, and where it is silent while `is_frozen`, or for so many seconds
        that it `is_stalled`."""
        stream = self._stream
        assert stream is not None
        stream.is_frozen, stream.passed_on = is_frozen, passed_on
        stream.plain_on = plain_on
        if self.has_marks and not self.is_opaque:
            self._link.plain = stream.take_plain
            stream.is_stalled = is_stalled
        events: list[Event] | None = self.first
        yield [] if self.is_told else self.first
        while not (events and events[-1].is_done):
            events = await stream.more()
            if events is None:
                break
            yield events
        else:
            await stream.drain()
            return
        if not self.is_opaque and (stream.last is None or not _is_final(stream.last)):
            raise Lost("closed", "it closed the connection before the end of its answer")


class Events:
    """The site's events, read as they come. How long one may take is watched from outside, for all streams at once: a timer each would be set and
    cleared for every token."""

    def __init__(self, link: Link, idle_timeout_s: float) -> None:
        self.is_frozen: Callable[[], bool] | None = None
        self.is_stalled: Callable[[float], bool] | None = None
        self.passed_on: PassedOn | None = None
        self.plain_on: PlainOn | None = None
        self.last: Event | None = None  # that carried data
        self._come: list[Event] | None = None  # to be handed out
        self._link = link
        self._decoder = EventDecoder()
        self._idle_timeout_s = idle_timeout_s
        self._waits_since: float | None = None
        link.sink = self._take

    async def more(self) -> list[Event] | None:
        """The next events, None at a clean end. Progress is a whole event: bytes that never become one count as silence."""
        self._waits_since = time.monotonic()
        try:
            return await self.read()
        except SSEError as error:
            raise Lost("malformed", f"it sent {error}") from None
        except LinkLost as error:
            raise Lost("closed", str(error)) from None
        finally:
            self._waits_since = None

    def look(self, now: float, awake_since: float = float("-inf")) -> None:
        """Ends the wait for a site that has been silent for too long, or is and whose probes fail. `awake_since`: before then this process stood
        still itself, and what it did not hear says nothing of a site."""
        if self._waits_since is None:
            return
        silent_s = now - self._waits_since
        if silent_s >= self._idle_timeout_s:
            self._link.fail(Lost("silent", f"it was silent for {self._idle_timeout_s:g} s"))
        elif silent_s >= LOOK_AGAIN_S and self.is_frozen is not None and self.is_frozen():
            self._link.fail(Lost("frozen", f"it was silent for {silent_s:.1f} s, and its probes fail"))
        elif self.is_stalled is not None and self.is_stalled(heard_s := now - max(self._waits_since, awake_since)):
            self._link.fail(Lost("stalled", f"it was silent for {heard_s:.1f} s, though its probes are answered"))

    async def read(self) -> list[Event] | None:
        link = self._link
        while self._come is None:
            if link.has_parts:
                self._come = self.decoded(link.take()) or None
            elif not link.is_done:
                await link.news()
            elif self._decoder.pending_bytes:
                raise Lost("closed", "it closed the connection inside an event")
            else:
                return None
        events, self._come = self._come, None
        return events

    def _take(self, chunk: bytes) -> None:
        """What comes while it is waited for goes on from here, as far as it may: a task's turn for every token costs as much as the token."""
        try:
            events = self.decoded(chunk)
        except SSEError as error:
            return self._link.fail(error)
        left = events if self.passed_on is None or not events else self.passed_on(events)
        if left is None:
            self._waits_since = time.monotonic()
        elif left or events:
            self._come = left
            self._link.wake()

    def take_plain(self, read: bytes) -> bool:
        if self._decoder.pending_bytes or self.plain_on is None or (event := PlainEvent.of(read)) is None:
            return False
        if not self.plain_on(event):
            return False
        self._waits_since, self.last = time.monotonic(), NOT_THE_LAST
        return True

    def decoded(self, chunk: bytes) -> list[Event]:
        events = self._decoder.feed(chunk)
        for event in reversed(events):
            if event.data is not None:
                self.last = event
                break
        return events

    async def drain(self) -> None:
        """Nothing but the end should follow; a site that goes on is cut off."""
        self._link.sink = self._link.plain = None
        if self._link.is_done:
            return
        try:
            async with asyncio.timeout(LAST_CHUNK_S):
                while await self._link.read():
                    pass
        except (TimeoutError, LinkLost):
            return  # the answer was complete: only the connection is not reused


class _Pieces(Events):
    """A function's stream, whatever it is: each read as one piece."""

    def decoded(self, chunk: bytes) -> list[Event]:
        return [Event(None, None, None, chunk)]


class Upstream:
    """`async with` it: leaving closes all connections."""

    def __init__(self, relay: RelayConfig, secret: str, clocks: SiteClocks) -> None:
        self.pool = LinkPool(relay.connect_timeout_s)
        self.relay = relay
        self._secret, self._clocks = secret, clocks
        self._origins: dict[str, Origin] = {}
        self._streams: set[Events] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Upstream":
        self._watch = asyncio.create_task(self._look_after_streams())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        self.pool.close()

    def send(self, link: Link, site: str, request: ValidRequest) -> None:
        body = request.delivery + request.body if request.delivery else request.body
        head = request_head(
            link.origin, request, request.head_lines(self._secret, self._clocks.now_s(site), site, body), len(body)
        )
        link.send(head, body, is_head_request=request.head.method == "HEAD")

    def read_events(self, link: Link, *, as_pieces: bool = False) -> "Events":
        stream = (_Pieces if as_pieces else Events)(link, self.relay.idle_timeout_s)
        self._streams.add(stream)
        return stream

    def leave(self, link: Link, stream: Events | None) -> None:
        if stream is not None:
            self._streams.discard(stream)
        self.pool.put_back(link)

    def origin(self, url: str) -> Origin:
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = Origin.of(url)
        return origin

    async def _look_after_streams(self) -> None:
        """A few at a time, and whatever else has come goes between: nine thousand in one go kept every token waiting for 12 ms."""
        interval_s = min(LOOK_AGAIN_S, self.relay.idle_timeout_s) / 2
        looked_at, awake_since = time.monotonic(), float("-inf")
        while True:
            await asyncio.sleep(interval_s)
            before, looked_at = looked_at, time.monotonic()
            if looked_at - before > interval_s + LOOK_AGAIN_S:
                awake_since = looked_at
            streams = tuple(self._streams)
            for start in range(0, len(streams), LOOKED_AT_ONCE):
                now = time.monotonic()
                for stream in streams[start : start + LOOKED_AT_ONCE]:
                    stream.look(now, awake_since)
                await asyncio.sleep(0)
            self.pool.sweep()


def header(headers: Sequence[tuple[str, str]], name: str) -> str:
    """The first of that name, or nothing. Names are lower case."""
    for key, value in headers:
        if key == name:
            return value
    return ""


def request_head(origin: Origin, request: ValidRequest, lines: bytes, body_bytes: int) -> bytes:
    method = request.head.method
    head = f"{method} {request.head.target} HTTP/1.1\r\nhost: {origin.authority}\r\n".encode("latin-1") + lines
    if body_bytes or method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        head += b"content-length: %d\r\n" % body_bytes
    return head + b"\r\n"


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of either dialect; empty where the body is none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(fields, dict):
        return {}
    errors = fields.get("errors")
    error = errors[0] if isinstance(errors, list) and errors else fields.get("error")
    return error if isinstance(error, dict) else {}


def is_sites_own_fault(event: Event) -> bool:
    """An error event after which another site may well go on, other than one that says what is wrong with the request."""
    return event.data is not None and b'"error' in event.data and error_of(event.data).get("code") in SITES_OWN_FAULT


def _is_final(event: Event) -> bool:
    """After [DONE], or an error event, a stream may end."""
    assert event.data is not None
    return event.is_done or bool(error_of(event.data))


def _downstream_headers(link: Link, body: bytes | None) -> list[tuple[str, str]]:
    headers = [pair for pair in forwardable(link.headers) if pair[0] not in OUR_OWN_HEADERS]
    if site := header(link.headers, SITE):
        headers.append((SITE, site))
    if link.is_head_request:
        headers += [pair for pair in link.headers if pair[0] == "content-length"]
    elif body is not None and link.status not in (204, 304):
        headers.append(("content-length", str(len(body))))
    return headers


def reason_of(error: BaseException) -> str:
    """aiohttp's own sentence for a failed connection speaks of its TLS setting first."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(error.os_error.errno)}"
    return str(error) or type(error).__name__
