"""A site's side of one exchange: ask it, and hand back an answer only once there is something to pass on.

`ask` either returns an Answer whose first byte has arrived or raises SiteFailed, which means that this site has given nothing and another one
may be tried. After that, `Answer.batches` raises Lost. Knows HTTP and framing; choosing, retrying and telling the client are proxy.py's.
"""

import asyncio
import io
import os
import time
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Literal

import aiohttp
import orjson
from yarl import URL

from edge_router.peek import ValidRequest
from sites.config import RelayConfig
from wire.continuation import MARKS
from wire.headers import SITE, forwardable
from wire.sse import Event, EventDecoder, SSEError

Failure = Literal["connect", "lost", "silent", "full", "draining", "malformed", "refused"]
Cause = Literal["closed", "silent", "frozen", "error", "draining", "malformed"]

MAX_ANSWER_BYTES = (
    64 << 20
)  # of an answer that is not a stream: it is read whole so that its loss can be made good elsewhere
SMALL_BYTES = 1 << 20  # of a function's answer of known length, which is relayed in one piece
LOOK_AGAIN_S = 0.5  # silence inside a stream, after which the site's probes are asked whether it still lives
KEEP_ALIVE_S = 4.0  # below Hypercorn's default of 5 s, so that a connection is never reused while the site closes it
LAST_CHUNK_S = 0.5  # after the last event, the end of the HTTP body: then the connection can be used again
SPENT_STATUSES = frozenset({502, 503, 504})
WORKERS_AI_FULL = 3040
ENGINE_LOST = ("engine_error", 5000)  # in either dialect: the engine died or failed
SITES_OWN_FAULT = (*ENGINE_LOST, "internal_error", "draining", "overloaded", WORKERS_AI_FULL)  # as an error event
OUR_OWN_HEADERS = frozenset({"server", "date"})  # our server writes its own


class SiteFailed(Exception):
    """This site did not answer: nothing of the answer came from it."""

    def __init__(self, kind: Failure, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s


class Lost(Exception):
    """The site stopped in the middle of its stream."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def connector() -> aiohttp.TCPConnector:
    """aiohttp sets TCP_NODELAY itself. No limit: admission is the sites' business, and a wait for a connection would hide in the RTT."""
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
        self,
        response: aiohttp.ClientResponse,
        body: bytes | None,
        stream: "_Events | _Bytes | None",
        first: list[Event],
    ) -> None:
        self.status = response.status
        self.headers = _downstream_headers(response, body)
        self.body = body  # None: a stream
        self.has_marks = body is None and response.headers.get(MARKS) == "1"  # it can be continued elsewhere
        self.is_opaque = isinstance(
            stream, _Bytes
        )  # a function's: what is in it, and how it ends, is not ours to judge
        self._response = response
        self._stream = stream
        self._first = first

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._response.close()  # no effect on a response that was read to its end: its connection is back in the pool

    async def batches(self, is_frozen: Callable[[], bool]) -> AsyncGenerator[list[Event], None]:
        """Whole events, as many at once as one read delivered. Raises Lost where the stream ends without having said so, and where it is
        silent while `is_frozen`."""
        assert self._stream is not None
        events: list[Event] | None = self._first
        last: Event | None = None
        while events is not None:
            if events:
                yield events
                last = next((event for event in reversed(events) if event.data is not None), last)
                if events[-1].is_done:
                    await self._stream.drain()
                    return
            events = await self._stream.more(is_frozen)
        if not self.is_opaque and (last is None or not _is_final(last)):
            raise Lost("closed", "it closed the connection before the end of its answer")


class _Bytes:
    """A function's stream: each read as one piece."""

    def __init__(self, response: aiohttp.ClientResponse, idle_timeout_s: float) -> None:
        self._content = response.content
        self._idle_timeout_s = idle_timeout_s

    async def more(self, is_frozen: Callable[[], bool]) -> list[Event] | None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                chunk = await self._content.readany()
        except TimeoutError:
            raise Lost("silent", f"it was silent for {self._idle_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost("closed", reason_of(error)) from None
        return [Event(None, None, None, chunk)] if chunk else None

    async def drain(self) -> None:
        return


class _Events:
    """The site's events, read as they come."""

    def __init__(self, response: aiohttp.ClientResponse, idle_timeout_s: float) -> None:
        self._content = response.content
        self._decoder = EventDecoder()
        self._idle_timeout_s = idle_timeout_s

    async def more(self, is_frozen: Callable[[], bool]) -> list[Event] | None:
        """The next events, None at a clean end. Progress is a whole event: bytes that never become one count as silence."""
        silent_s = 0.0
        while silent_s < self._idle_timeout_s:
            wait_s = min(LOOK_AGAIN_S, self._idle_timeout_s - silent_s)
            try:
                async with asyncio.timeout(wait_s):
                    return await self.read()
            except TimeoutError:
                silent_s += wait_s
            except SSEError as error:
                raise Lost("malformed", f"it sent {error}") from None
            except (aiohttp.ClientError, OSError) as error:
                raise Lost("closed", reason_of(error)) from None
            if is_frozen():
                raise Lost("frozen", f"it was silent for {silent_s:g} s, and its probes fail")
        raise Lost("silent", f"it was silent for {self._idle_timeout_s:g} s")

    async def read(self) -> list[Event] | None:
        while chunk := await self._content.readany():
            if events := self._decoder.feed(chunk):
                return events
        if self._decoder.pending_bytes:
            raise Lost("closed", "it closed the connection inside an event")
        return None

    async def drain(self) -> None:
        """Nothing but the end should follow; a site that goes on is cut off."""
        try:
            async with asyncio.timeout(LAST_CHUNK_S):
                while await self._content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            return  # the answer was complete: only the connection is not reused


class Upstream:
    def __init__(self, session: aiohttp.ClientSession, relay: RelayConfig, secret: str) -> None:
        self._session = session
        self._relay = relay
        self._secret = secret

    async def ask(self, url: str, request: ValidRequest, first_byte_s: float) -> Answer:
        """Raises SiteFailed. On cancellation the connection is closed."""
        patience_s = self._relay.answer_timeout_s if request.is_generated_whole else first_byte_s
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(patience_s):
                response = await self._session.request(
                    request.head.method,
                    URL(url + request.head.target, encoded=True),
                    data=_payload(request.delivery + request.body),
                    headers=request.sent_headers(self._secret, time.time()),
                    allow_redirects=False,
                )
            if request.head.is_for_function:
                answer = await self._pass_through(response, patience_s)
            elif response.content_type == "text/event-stream":
                answer = await self._begin_stream(response, first_byte_s)
            else:
                answer = await self._read_whole(response, patience_s)
            response = None  # the answer owns it now
            return answer
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise SiteFailed("connect", reason_of(error)) from None
        except TimeoutError:
            raise SiteFailed("silent", f"it sent nothing for {patience_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise SiteFailed("lost", reason_of(error)) from None
        finally:
            if response is not None:
                response.close()

    async def _begin_stream(self, response: aiohttp.ClientResponse, patience_s: float) -> Answer:
        """Up to the first event that carries data. A heartbeat is no answer; but when the patience ends and there were heartbeats, the site
        is at work, and the client is told so instead of starting again elsewhere."""
        stream = _Events(response, self._relay.idle_timeout_s)
        first: list[Event] = []
        try:
            async with asyncio.timeout(patience_s):
                while not any(event.data is not None for event in first):
                    events = await stream.read()
                    if events is None:
                        raise SiteFailed("lost", "it closed the connection before its first event")
                    first += events
        except TimeoutError:
            if not first:
                raise
        except SSEError as error:
            raise SiteFailed("malformed", f"it sent {error}") from None
        except Lost as error:
            raise SiteFailed("lost", str(error)) from None
        return Answer(response, None, stream, first)

    async def _pass_through(self, response: aiohttp.ClientResponse, patience_s: float) -> Answer:
        """A function's answer. Only a site that is full or draining, which says so with a 503 of its own, is told from it."""
        if response.status != 503 and not 0 <= (response.content_length or -1) <= SMALL_BYTES:
            return Answer(response, None, _Bytes(response, self._relay.idle_timeout_s), [])
        body = await self._body(response, patience_s)
        if response.status == 503 and _error_of(body).get("code") in ("draining", "overloaded"):
            _refuse_spent(response, body)
        return Answer(response, body, None, [])

    async def _read_whole(self, response: aiohttp.ClientResponse, patience_s: float) -> Answer:
        body = await self._body(response, patience_s)
        _refuse_spent(response, body)
        return Answer(response, body, None, [])

    async def _body(self, response: aiohttp.ClientResponse, patience_s: float) -> bytes:
        body = bytearray()
        while True:
            async with asyncio.timeout(patience_s):
                chunk = await response.content.readany()
            if not chunk:
                break
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise SiteFailed("malformed", f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        return bytes(body)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """aiohttp writes a BytesIO in pieces, and warns of bytes beyond 1 MiB because one write of them holds up the event loop."""
    if len(body) > 1 << 20:
        return io.BytesIO(body)
    return body or None


def _refuse_spent(response: aiohttp.ClientResponse, body: bytes) -> None:
    """A site that is full, draining or a broken gateway says so with a status; what is the client's own fault passes through."""
    if response.status not in SPENT_STATUSES and response.status not in (429, 500):
        return
    error = _error_of(body)
    if response.status == 500:
        if error.get("code") in ENGINE_LOST:
            raise SiteFailed("lost", f"its engine failed: {str(error.get('message', ''))[:200]}")
        return
    if response.status == 429 and error.get("code") != WORKERS_AI_FULL:
        return  # the tenant's own quota: every site would say the same
    kind: Failure = "draining" if error.get("code") == "draining" else "full"
    after = response.headers.get("retry-after", "")
    said = str(error.get("message", ""))[:200]
    detail = f"it answered {response.status}" + (f" ({said})" if said else "")
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


def _downstream_headers(response: aiohttp.ClientResponse, body: bytes | None) -> list[tuple[str, str]]:
    headers = [pair for pair in forwardable(response.headers.items()) if pair[0] not in OUR_OWN_HEADERS]
    if SITE in response.headers:
        headers.append((SITE, response.headers[SITE]))
    if body is not None and response.method != "HEAD" and response.status not in (204, 304):
        headers.append(("content-length", str(len(body))))
    return headers


def reason_of(error: BaseException) -> str:
    """aiohttp's own sentence for a failed connection speaks of its TLS setting first."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(error.os_error.errno)}"
    return str(error) or type(error).__name__
