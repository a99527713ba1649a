"""A site's side of one exchange: ask it, and hand back an answer only once there is something to pass on.

`ask` either returns an Answer whose first byte has arrived or raises SiteFailed, which means that this site has given nothing and another one
may be tried. After that, `Answer.batches` raises Lost. Knows HTTP and framing; choosing, retrying and telling the client are proxy.py's.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal

import aiohttp
import orjson

from edge_router.backend import Ticket
from edge_router.link import KEEP_ALIVE_S, CannotConnect, Link, LinkLost, LinkPool, Origin
from edge_router.peek import ValidRequest
from sites.config import RelayConfig
from wire.continuation import MARKS
from wire.headers import QUEUE, SITE, forwardable
from wire.sse import Event, EventDecoder, SSEError

Failure = Literal["connect", "lost", "silent", "full", "draining", "malformed", "refused", "declined"]
Cause = Literal["closed", "silent", "frozen", "error", "draining", "malformed"]

PassedOn = Callable[
    [list[Event]], list[Event] | None
]  # what is left to do of some events: None: nothing, not even to look at them

MAX_ANSWER_BYTES = (
    64 << 20
)  # of an answer that is not a stream: it is read whole so that its loss can be made good elsewhere
SMALL_BYTES = 1 << 20  # of a function's answer of known length, which is relayed in one piece
LOOK_AGAIN_S = 0.5  # silence inside a stream, after which the site's probes are asked whether it still lives
AT_WORK_SHARE = 0.1  # of the patience that is not waited for, where a site sends heartbeats
LAST_CHUNK_S = 0.5  # after the last event, the end of the HTTP body: then the connection can be used again
SPENT_STATUSES = frozenset({502, 503, 504})
WORKERS_AI_FULL = 3040
ENGINE_LOST = ("engine_error", 5000)  # in either dialect: the engine died or failed
SITES_OWN_FAULT = (*ENGINE_LOST, "internal_error", "draining", "overloaded", WORKERS_AI_FULL)  # as an error event
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
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
        self, upstream: "Upstream", link: Link, body: bytes | None, stream: "_Events | None", first: list[Event]
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
        self._stream = stream
        self._first = first

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

    async def batches(self, is_frozen: Callable[[], bool], passed_on: PassedOn) -> AsyncGenerator[list[Event], None]:
        """Whole events, as many at once as one read delivered; those that `passed_on` leaves of what comes while they are waited for, which
        may be none. Raises Lost where the stream ends without having said so, and where it is silent while `is_frozen`."""
        stream = self._stream
        assert stream is not None
        stream.is_frozen, stream.passed_on = is_frozen, passed_on
        events: list[Event] | None = self._first
        while events is not None:
            yield events
            if events and events[-1].is_done:
                await stream.drain()
                return
            events = await stream.more()
        if not self.is_opaque and (stream.last is None or not _is_final(stream.last)):
            raise Lost("closed", "it closed the connection before the end of its answer")


class _Events:
    """The site's events, read as they come. How long one may take is watched from outside, for all streams at once: a timer each would be set and
    cleared for every token."""

    def __init__(self, link: Link, idle_timeout_s: float) -> None:
        self.is_frozen: Callable[[], bool] | None = None
        self.passed_on: PassedOn | None = None
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

    def look(self, now: float) -> None:
        """Ends the wait for a site that has been silent for too long, or is and whose probes fail."""
        if self._waits_since is None:
            return
        silent_s = now - self._waits_since
        if silent_s >= self._idle_timeout_s:
            self._link.fail(Lost("silent", f"it was silent for {self._idle_timeout_s:g} s"))
        elif silent_s >= LOOK_AGAIN_S and self.is_frozen is not None and self.is_frozen():
            self._link.fail(Lost("frozen", f"it was silent for {silent_s:.1f} s, and its probes fail"))

    async def read(self) -> list[Event] | None:
        link = self._link
        while self._come is None:
            if link.has_parts:
                self._come = self._decoded(link.take()) or None
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
            events = self._decoded(chunk)
        except SSEError as error:
            return self._link.fail(error)
        left = events if self.passed_on is None or not events else self.passed_on(events)
        if left is None:
            self._waits_since = time.monotonic()
        elif left or events:
            self._come = left
            self._link.wake()

    def _decoded(self, chunk: bytes) -> list[Event]:
        events = self._decoder.feed(chunk)
        for event in reversed(events):
            if event.data is not None:
                self.last = event
                break
        return events

    async def drain(self) -> None:
        """Nothing but the end should follow; a site that goes on is cut off."""
        self._link.sink = None
        if self._link.is_done:
            return
        try:
            async with asyncio.timeout(LAST_CHUNK_S):
                while await self._link.read():
                    pass
        except (TimeoutError, LinkLost):
            return  # the answer was complete: only the connection is not reused


class _Pieces(_Events):
    """A function's stream, whatever it is: each read as one piece."""

    def _decoded(self, chunk: bytes) -> list[Event]:
        return [Event(None, None, None, chunk)]


class Upstream:
    """`async with` it: leaving closes all connections."""

    def __init__(self, relay: RelayConfig, secret: str) -> None:
        self.pool = LinkPool(relay.connect_timeout_s)
        self._relay = relay
        self._secret = secret
        self._origins: dict[str, Origin] = {}
        self._streams: set[_Events] = set()
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

    async def ask(
        self, url: str, request: ValidRequest, first_byte_s: float, ticket: Ticket, meanwhile: Callable[[], None]
    ) -> Answer:
        """Raises SiteFailed. `meanwhile` is called when the site has been asked: what is done there keeps nobody waiting. A site that
        stops answering its probes while we wait for its first byte is left at once: a machine that froze or a cable that was cut closes no
        connection. On cancellation the connection is closed."""
        patience_s = self._relay.answer_timeout_s if request.is_generated_whole else first_byte_s
        patience = _Patience(patience_s)
        ticket.on_site_lost = patience.site_lost
        link: Link | None = None
        stream: _Events | None = None
        try:
            origin = self.origin(url)
            link = self.pool.idle(origin) or await patience.within(self.pool.connect(origin, Link))
            patience.link = link
            body = request.delivery + request.body if request.delivery else request.body
            head = request_head(link.origin, request, request.sent_headers(self._secret, time.time()), len(body))
            link.send(head, body, is_head_request=request.head.method == "HEAD")
            meanwhile()
            await link.head()
            if request.head.is_for_function:
                answer = await self._pass_through(link, patience, patience_s)
            elif header(link.headers, "content-type").partition(";")[0].strip().lower() == "text/event-stream":
                stream = _Events(link, self._relay.idle_timeout_s)
                self._streams.add(stream)
                answer = Answer(self, link, None, stream, await self._first_events(stream, patience, first_byte_s))
            else:
                body = await self._read_whole(link, patience, patience_s)
                _refuse_spent(link, body)
                answer = Answer(self, link, body, None, [])
            if patience.is_over:
                raise TimeoutError
            link = None  # the answer owns it now
            return answer
        except CannotConnect as error:
            raise SiteFailed("connect", str(error)) from None
        except TimeoutError:
            if patience.is_site_lost:
                raise SiteFailed("silent", f"it became unhealthy before its first byte: {ticket.detail}") from None
            raise SiteFailed("silent", f"it sent nothing for {patience_s:g} s") from None
        except LinkLost as error:
            raise SiteFailed("lost", str(error)) from None
        except SSEError as error:
            raise SiteFailed("malformed", f"it sent {error}") from None
        except Lost as error:
            raise SiteFailed("lost", str(error)) from None
        finally:
            ticket.on_site_lost = None
            patience.end()
            if link is not None:
                self.leave(link, stream)

    def leave(self, link: Link, stream: _Events | None) -> None:
        if stream is not None:
            self._streams.discard(stream)
        self.pool.put_back(link)

    async def _first_events(self, stream: _Events, patience: "_Patience", patience_s: float) -> list[Event]:
        """Up to the first event that carries data. A heartbeat is no answer; but when most of the patience is over and there were
        some, the site is at work, and the client is told so instead of starting again elsewhere."""
        deadline = patience.begin_anew(patience_s)
        first: list[Event] = []
        while not any(event.data is not None for event in first):
            if first:
                try:
                    async with asyncio.timeout_at(deadline - patience_s * AT_WORK_SHARE):
                        events = await stream.read()
                except TimeoutError:
                    return first
            else:
                events = await stream.read()
            if events is None:
                raise SiteFailed("lost", "it closed the connection before its first event")
            first += events
        return first

    async def _pass_through(self, link: Link, patience: "_Patience", patience_s: float) -> Answer:
        """A function's answer. Only a site that is full or draining, which says so with a 503 of its own, is told from it."""
        length = header(link.headers, "content-length")
        is_small = length.isdigit() and int(length) <= SMALL_BYTES
        if link.status != 503 and not is_small and not link.is_done:
            stream = _Pieces(link, self._relay.idle_timeout_s)
            self._streams.add(stream)
            return Answer(self, link, None, stream, [])
        body = await self._read_whole(link, patience, patience_s)
        refuse_busy(link, body)
        return Answer(self, link, body, None, [])

    async def _read_whole(self, link: Link, patience: "_Patience", patience_s: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            if not link.has_news:
                patience.begin_anew(patience_s)
            if not (chunk := await link.read()):
                break
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise SiteFailed("malformed", f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)

    def origin(self, url: str) -> Origin:
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = Origin.of(url)
        return origin

    async def _look_after_streams(self) -> None:
        interval_s = min(LOOK_AGAIN_S, self._relay.idle_timeout_s) / 2
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            for stream in tuple(self._streams):
                stream.look(now)
            self.pool.sweep()


class _Patience:
    """How long a site may keep one request waiting. It has a timer of its own, not a task's time-out, which costs 4 us each time it is set: the timer
    is left as it is when the patience begins anew, and looks at the clock when it rings."""

    def __init__(self, seconds: float) -> None:
        self.link: Link | None = None
        self.is_over = self.is_site_lost = False
        self._connecting: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._until, self._ring)

    def begin_anew(self, seconds: float) -> float:
        """When it will be over, on the loop's clock."""
        self._until = self._loop.time() + seconds
        if self._until < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._until, self._ring)
        return self._until

    async def within(self, connecting: Coroutine[Any, Any, Link]) -> Link:
        """Raises TimeoutError when it is over before there is a link."""
        try:
            async with asyncio.timeout_at(self._until) as self._connecting:
                return await connecting
        finally:
            self._connecting = None

    def site_lost(self) -> None:
        """There is nothing to wait for any more."""
        self.is_site_lost = True
        self._end_wait()

    def end(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._ring)
        else:
            self._end_wait()

    def _end_wait(self) -> None:
        self.is_over = True
        if self.link is not None:
            self.link.fail(TimeoutError())
        elif self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(self._loop.time())


def header(headers: Sequence[tuple[str, str]], name: str) -> str:
    """The first of that name, or nothing. Names are lower case."""
    for key, value in headers:
        if key == name:
            return value
    return ""


def request_head(origin: Origin, request: ValidRequest, headers: Sequence[tuple[str, str]], body_bytes: int) -> bytes:
    lines = [f"{request.head.method} {request.head.target} HTTP/1.1\r\nhost: {origin.authority}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers]
    if body_bytes or request.head.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(f"content-length: {body_bytes}\r\n")
    return "".join(lines).encode("latin-1") + b"\r\n"


def refuse_busy(link: Link, body: bytes) -> None:
    """Of a function's answers those that are its site's: that it is full, or draining. Raises SiteFailed."""
    if link.status == 503 and _error_of(body).get("code") in ("draining", "overloaded"):
        _refuse_spent(link, body)


def _refuse_spent(link: Link, body: bytes) -> None:
    """A site that is full, draining or a broken gateway says so with a status; what is the client's own fault passes through."""
    if link.status not in SPENT_STATUSES and link.status not in (429, 500):
        return
    error = _error_of(body)
    if link.status == 500:
        if error.get("code") in ENGINE_LOST:
            raise SiteFailed("lost", f"its engine failed: {str(error.get('message', ''))[:200]}")
        return
    if link.status == 429 and error.get("code") != WORKERS_AI_FULL:
        return  # the tenant's own quota: every site would say the same
    kind: Failure = "draining" if error.get("code") == "draining" else "full"
    queue = header(link.headers, QUEUE)
    if queue.isascii() and queue.isdigit() and len(queue) < 12:
        raise SiteFailed("declined", f"its queue of {queue} tokens is too long", queued_tokens=int(queue))
    after = header(link.headers, "retry-after")
    said = str(error.get("message", ""))[:200]
    detail = f"it answered {link.status}" + (f" ({said})" if said else "")
    raise SiteFailed(kind, detail, float(after) if after.isascii() and after.isdigit() and len(after) < 6 else None)


def _error_of(body: bytes) -> dict[str, Any]:
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
    return event.data is not None and b'"error' in event.data and _error_of(event.data).get("code") in SITES_OWN_FAULT


def _is_final(event: Event) -> bool:
    """After [DONE], or an error event, a stream may end."""
    assert event.data is not None
    return event.is_done or bool(_error_of(event.data))


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
