"""Requests to sites: one attempt at one site, and its response once there is something to forward."""

import asyncio
import base64
import os
import re
import ssl
import time
from types import TracebackType
from typing import Protocol

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.forwarding.relay import (
    DeliveryLog,
    Forward,
    OpaqueRelay,
    RelayEvent,
    SiteDraining,
    StreamBroken,
    StreamDone,
    StreamRelay,
)
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost, plain_failure, raise_refusal
from pilotlight.edge_router.forwarding.timeouts import LOOK_AGAIN_S, LOST_S, AnswerLimits, AttemptLimits, SilenceWatch
from pilotlight.edge_router.requests.request import ValidRequest, aside_if_large
from pilotlight.sites.network import RelayConfig
from pilotlight.support import background
from pilotlight.wire.hop.continuation import RESUME_POINTS
from pilotlight.wire.hop.headers import CLOCK, NOT_FORWARDED, REFUSAL, REQUEST_ID, ROUTE, SITE, forwardable
from pilotlight.wire.hop.usage import USAGE, WORK, ResourceUse, decode_use
from pilotlight.wire.http.client import (
    CannotConnect,
    ConnectionLost,
    ConnectionPool,
    NoDescriptors,
    Origin,
    ResponseParser,
    UpstreamConnection,
)

SMALL_BYTES = 1 << 20  # responses of functions up to this known length are relayed in one piece
AT_WORK_SHARE = 0.1  # part of the first byte's time limit, after which a site that sends heartbeats counts as working
# headers of a site's response that the client does not get: the router writes some of them itself
_NOT_RETURNED = NOT_FORWARDED | {"server", "date", REQUEST_ID}
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')


class Forwarder(Protocol):
    """Forwards a stream's events to a client."""

    def forward(self, data: bytes) -> bool:
        """Send whole events if that needs no wait. Returns whether they were sent."""


class SitePace(Protocol):
    """Decides when to give up on a silent site."""

    def may_leave(self) -> bool:
        """Tell whether the request can go elsewhere, before the first event."""

    def may_move(self) -> bool:
        """Tell whether another site can continue the stream."""

    def is_frozen(self) -> bool:
        """Tell whether the site's probes fail."""

    def is_stalled(self, silent_s: float) -> bool:
        """Tell whether a stream should continue elsewhere after a silence."""


class UpstreamAttempt:
    """One request to one site, with its connection and its timeouts."""

    def __init__(
        self,
        upstream: "SiteConnections",
        site: str,
        url: str,
        request: ValidRequest,
        limits: AttemptLimits,
        pace: SitePace,
        log: DeliveryLog,
    ) -> None:
        self._upstream = upstream
        self._site, self._origin = site, Origin.of(url)
        self._request = request
        self._limits = limits
        self._time_limit_s = upstream.config.answer_timeout_s if request.is_generated_whole else limits.first_byte_s
        self._pace = pace
        self._log = log
        self.heard_at = self._look_again_at = self._started_at = time.monotonic()
        self._waits_since = self._started_at
        self._is_over = False
        self._connecting: asyncio.Timeout | None = None
        self._connection: UpstreamConnection | None = None
        self._lost_because: str | None = None

    async def response(self) -> "UpstreamResponse":
        """Send the request and wait for a response that can be forwarded.
        Raises SiteFailed. A site that stops answering its probes is left at once if another site can answer: a frozen machine or a cut cable
        closes no connection. On cancellation the connection is closed."""
        upstream = self._upstream
        upstream.silence.watched.add(self)
        try:
            connection = await self._head()
            if upstream.learns_clock(connection.response, self._site, self._request):
                await self._body(connection)  # read to the end, so that the connection can be reused
                self._connection = None
                upstream.pool.put_back(connection)
                connection = await self._head()
            response = await self._read(connection)
            if self._is_over and not response.has_answered:
                raise TimeoutError
            self._connection = None  # the response owns it now
            return response
        except CannotConnect as error:
            raise SiteFailed("no_files" if isinstance(error, NoDescriptors) else "connect", str(error)) from None
        except TimeoutError:
            if self._lost_because is not None:
                detail = f"it became unhealthy before its first byte: {self._lost_because}"
                raise SiteFailed("silent", detail) from None
            waited_s = time.monotonic() - self._started_at
            raise SiteFailed("silent", f"it sent nothing for {waited_s:.3g} s") from None
        except ConnectionLost as error:
            raise SiteFailed("lost", str(error)) from None
        finally:
            upstream.silence.watched.discard(self)
            if self._connection is not None:
                upstream.pool.put_back(self._connection)

    def site_lost(self, because: str) -> None:
        """End the wait because the site's probes fail.

        A request that no other site can answer waits until the silence is long: this is called again after each further failed probe.
        """
        silent_s = self._upstream.silence.pauses.silent_s(self.heard_at, time.monotonic())
        if self._pace.may_leave() or silent_s >= self._limits.lost_s:
            self._lost_because = because
            self._expire()

    def look(self, now: float, awake_since: float) -> None:
        if now - max(self._waits_since, awake_since) >= self._time_limit_s:
            return self._expire()
        if now < self._look_again_at or now - max(self.heard_at, awake_since) < self._limits.stall_s:
            return
        self._look_again_at = now + LOOK_AGAIN_S
        if self._pace.may_leave():
            self._expire()

    def _expire(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.interrupt(TimeoutError())
        elif self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())

    async def _head(self) -> UpstreamConnection:
        """Return a connection that has received the response's head.

        A kept connection that its site closed before the request arrived does not count as a failure.
        """
        upstream, request = self._upstream, self._request
        # Before a connection is taken, because it may be lost and the time limit may expire while a large body is signed.
        lines = await aside_if_large(request.body, upstream.signed_lines, self._site, request)
        if self._is_over:
            raise TimeoutError
        self._connection = kept = upstream.pool.idle(self._origin)
        if kept is not None:
            try:
                upstream.send(kept, lines, request)
                await kept.head()
                return kept
            except ConnectionLost:
                if not (kept.response.is_untouched and request.head.may_be_repeated):
                    raise
            self._connection = None
            upstream.pool.put_back(kept)
        if self._is_over:  # the time limit expired while there was no read to interrupt
            raise TimeoutError
        try:
            async with asyncio.timeout(None) as self._connecting:  # `_expire` ends it
                self._connection = connection = await upstream.pool.connect(self._origin)
        finally:
            self._connecting = None
        upstream.send(connection, lines, request)
        await connection.head()
        return connection

    async def _read(self, connection: UpstreamConnection) -> "UpstreamResponse":
        head = connection.response
        if self._request.head.is_for_function:
            return await self._function_response(connection)
        if head.header("content-type").partition(";")[0].strip().lower() == "text/event-stream":
            relay = StreamRelay(self._log, is_resumable=head.header(RESUME_POINTS) == "1")
            if not relay.is_resumable:
                self._check_continuation(head.status)
            first = await self._first_events(connection, relay)
            return UpstreamResponse(self._upstream, connection, None, relay, first, self._pace)
        body = await self._body(connection)
        raise_refusal(connection.response, body, is_for_function=False)
        self._check_continuation(head.status)
        return UpstreamResponse(self._upstream, connection, body, failure=plain_failure(head, body))

    def _check_continuation(self, status: int) -> None:
        if self._limits.is_continuation:
            raise SiteFailed("refused", f"it answered {status} instead of continuing the stream")

    async def _first_events(self, connection: UpstreamConnection, relay: StreamRelay) -> list[RelayEvent]:
        """Return everything up to the first event with data.
        A heartbeat is not an answer; but if heartbeats came during most of the wait, the site is working, and the response starts instead of a retry
        elsewhere."""
        self._waits_since, self._time_limit_s = time.monotonic(), self._limits.first_byte_s
        at_work_at = self._waits_since + self._time_limit_s * (1 - AT_WORK_SHARE)
        first: list[RelayEvent] = []
        while not relay.has_data:
            if relay.num_events:
                try:
                    async with asyncio.timeout(max(0.0, at_work_at - time.monotonic())):
                        chunk = await connection.read()
                except TimeoutError:
                    return first
            else:
                chunk = await connection.read()
            if not chunk:
                raise SiteFailed("lost", "it closed the connection before its first event")
            if first and isinstance(first[-1], SiteDraining):
                first.pop()  # `feed` returns it again, after the data that the client must get before the stream moves
            first += relay.feed(chunk)
            if not relay.has_data and first and isinstance(broken := first[-1], StreamBroken):
                raise SiteFailed("malformed", broken.detail)
            self.heard_at = time.monotonic()
        return first

    async def _function_response(self, connection: UpstreamConnection) -> "UpstreamResponse":
        """Return a function's response. Only headers of the site itself can mark it as a failure."""
        response = connection.response
        if response.switched is not None:
            return UpstreamResponse(self._upstream, connection, None)
        length = response.header("content-length")
        is_small = self._request.head.is_websocket or (length.isdigit() and int(length) <= SMALL_BYTES)
        if not response.header(REFUSAL) and not is_small and not response.is_done:
            return UpstreamResponse(self._upstream, connection, None, OpaqueRelay(), [], self._pace)
        body = await self._body(connection)
        raise_refusal(connection.response, body, is_for_function=True)
        return UpstreamResponse(self._upstream, connection, body)

    async def _body(self, connection: UpstreamConnection) -> bytes:
        parts: list[bytes] = []
        size = 0
        response, most = connection.response, self._upstream.limits.max_body_bytes
        while response.held_bytes or not response.is_done:
            if not response.held_bytes:
                self._waits_since = time.monotonic()
            parts.append(chunk := await connection.read())
            size += len(chunk)
            if size > most:
                raise SiteFailed("malformed", f"its answer is larger than {most >> 20} MiB")
        return b"".join(parts)


class UpstreamResponse:
    """A site's response that has started: a whole `body`, or a stream to iterate over.

    Each iteration yields all events of one read. Use as `with`: leaving closes the connection to a site that is still sending.
    """

    def __init__(
        self,
        upstream: "SiteConnections",
        connection: UpstreamConnection,
        body: bytes | None,
        relay: StreamRelay | OpaqueRelay | None = None,
        first: list[RelayEvent] | None = None,
        pace: SitePace | None = None,
        failure: SiteFailed | None = None,
    ) -> None:
        """Take the response over from a connection.

        `first` has the part of a stream that was read already; `failure` is what a response with an error status counts as, unless the request is at
        fault.
        """
        self.failure = failure
        self.status = connection.response.status
        self.headers = _downstream_headers(connection, body)
        self.body = body
        # a function's stream: if it is lost, the client's response ends incomplete
        self.is_opaque = isinstance(relay, OpaqueRelay)
        self.is_resumable = relay is not None and relay.is_resumable  # it can be continued elsewhere
        # the site's decision where to compute the prompt; "" without a choice, or for a function
        self.route = "" if self.is_opaque else connection.response.header(ROUTE)
        self._relay = relay
        self._upstream = upstream
        self._connection = connection
        self._events = first  # events that the next iteration returns
        self._forwarder: Forwarder | None = None
        self._pace = pace
        self._is_done = False
        self._silent_since: float | None = None

    @property
    def has_answered(self) -> bool:
        """Tell whether the response is whole, or a part of its stream can be forwarded."""
        return not isinstance(self._relay, StreamRelay) or self._relay.has_data

    @property
    def use(self) -> ResourceUse:
        """Return the usage of a whole answer, from the site's headers or else the body's `completion_tokens`."""
        header = self._connection.response.header
        told = decode_use(header(USAGE), header(WORK))
        if told is not None:
            return told
        found = _COMPLETION_TOKENS.search(self.body[-2048:]) if self.body is not None else None
        return ResourceUse(output=int(found[1]) if found is not None else 0)

    def switched(self) -> tuple[asyncio.Transport, bytes]:
        """Give the connection away, with the bytes that came since the site switched protocols."""
        connection, pool = self._connection, self._upstream.pool
        pool.give_away(connection)
        return connection.transport, connection.response.switched or b""

    def __enter__(self) -> "UpstreamResponse":
        if self._relay is not None:
            self._upstream.silence.watched.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._upstream.silence.watched.discard(self)
        if self._connection.response.switched is None:
            self._upstream.pool.put_back(self._connection)

    def forward_by(self, forwarder: Forwarder) -> None:
        """Give events to `forward` as they come, without waking the task that iterates.
        The task gets the events that `forward` refuses, and all events of other types than `Forward`."""
        self._forwarder = forwarder

    def __aiter__(self) -> "UpstreamResponse":
        return self

    async def __anext__(self) -> list[RelayEvent]:
        """Return the events of the next read.

        Raises StreamLost if the connection ends or `look` has ended a silence. Only a whole event counts as progress.
        """
        if self._is_done:
            await self._drain()
            raise StopAsyncIteration
        assert self._relay is not None
        self._silent_since = time.monotonic()
        try:
            if self._events is None:
                await self._connection.pump(self)
            events, self._events = self._relay.end() if self._events is None else self._events, None
        except ConnectionLost as error:
            raise StreamLost("closed", str(error)) from None
        except TimeoutError:
            raise StreamLost("silent", "its time was over when its answer started") from None
        finally:
            self._silent_since = None
        self._is_done = bool(events) and isinstance(events[-1], StreamDone)
        return events

    def take(self, piece: bytes) -> bool:
        """Relay a chunk of the stream.
        Return True if the next chunk may come, False if the task must handle the events."""
        relay = self._relay
        assert relay is not None
        before = relay.num_events
        events = relay.feed(piece)
        if events and not self._is_forwarded(events):
            self._events = events
            return False
        if events or relay.num_events > before:
            self._silent_since = time.monotonic()
        return True

    def _is_forwarded(self, events: list[RelayEvent]) -> bool:
        only = events[0]
        if len(events) > 1 or not isinstance(only, Forward) or self._forwarder is None:
            return False
        return self._forwarder.forward(only.data)

    def look(self, now: float, awake_since: float) -> None:
        if self._silent_since is None:
            return
        assert self._pace is not None
        limit_s, silent_s = self._upstream.config.idle_timeout_s, now - max(self._silent_since, awake_since)
        if silent_s >= limit_s:
            self._connection.interrupt(StreamLost("silent", f"it was silent for {limit_s:g} s"))
        elif silent_s >= LOOK_AGAIN_S and self._pace.is_frozen() and (silent_s >= LOST_S or self._may_move()):
            self._connection.interrupt(StreamLost("frozen", f"it was silent for {silent_s:.1f} s, and its probes fail"))
        elif self.is_resumable and self._pace.is_stalled(silent_s):
            detail = f"it was silent for {silent_s:.1f} s, though its probes are answered"
            self._connection.interrupt(StreamLost("stalled", detail))

    def _may_move(self) -> bool:
        return self.is_resumable and self._pace is not None and self._pace.may_move()

    async def _drain(self) -> None:
        """Read to the end of the body so that the connection can be reused; time out after 0.5 s."""
        if self._connection.response.is_done:
            return
        try:
            async with asyncio.timeout(self._upstream.limits.last_chunk_s):
                while await self._connection.read():
                    pass
        except (TimeoutError, ConnectionLost, StreamLost):  # StreamLost: `look` ran between the last event and its task
            return  # the answer is complete; only the connection cannot be reused


class SiteConnections:
    """The connections to sites. `async with` it: leaving closes them all."""

    def __init__(
        self,
        config: RelayConfig,
        secret: str,
        clocks: SiteClocks,
        tls: ssl.SSLContext | None = None,
        limits: AnswerLimits | None = None,
    ) -> None:
        self.config, self.limits = config, limits or AnswerLimits()
        self.pool = ConnectionPool(config.connect_timeout_s, tls)
        self.silence = SilenceWatch(min(LOOK_AGAIN_S, config.idle_timeout_s) / 2)
        self._secret, self._clocks = secret, clocks
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "SiteConnections":
        self.silence.watched.add(self)
        self._watch = background.start(self.silence.run, "the watch over silent streams")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._watch is not None
        await background.stop(self._watch)
        self.pool.close()

    def look(self, now: float, awake_since: float) -> None:
        self.pool.sweep()

    def learns_clock(self, response: ResponseParser, site: str, request: ValidRequest) -> bool:
        """Tell whether the site refused the request because of a wrong clock and would accept it now."""
        refusal, told = response.header(REFUSAL), response.header(CLOCK)
        return bool(refusal) and self._clocks.learns(refusal, told, self._secret, site, request.request_id)

    def signed_lines(self, site: str, request: ValidRequest) -> bytes:
        """Return the request's header lines for a site."""
        body = request.delivery + request.body if request.delivery else request.body
        return request.head_lines(self._secret, self._clocks.now_s(site), site, body)

    def send(self, connection: UpstreamConnection, signed_lines: bytes, request: ValidRequest) -> None:
        """Send the request. Raises CannotConnect."""
        head, method = request.head, request.head.method
        body = request.delivery + request.body if request.delivery else request.body
        lines = f"{method} {head.target} HTTP/1.1\r\nhost: {connection.origin.authority}\r\n".encode("latin-1")
        lines += signed_lines
        if head.is_websocket:
            key = base64.b64encode(os.urandom(16))
            lines += b"connection: Upgrade\r\nupgrade: websocket\r\n"
            lines += b"sec-websocket-version: 13\r\nsec-websocket-key: %s\r\n" % key
        if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            lines += b"content-length: %d\r\n" % len(body)
        connection.send(lines + b"\r\n", body, is_head_request=method == "HEAD", may_switch=head.is_websocket)


def _downstream_headers(connection: UpstreamConnection, body: bytes | None) -> list[tuple[str, str]]:
    response = connection.response
    headers = forwardable(response.headers, _NOT_RETURNED)
    if site := response.header(SITE):
        headers.append((SITE, site))
    if response.is_to_head_request:
        headers += [pair for pair in response.headers if pair[0] == "content-length"]
    elif body is not None and response.status not in (204, 304):
        headers.append(("content-length", str(len(body))))
    return headers
