"""The client's side of one request, as pure ASGI.

Reads the body, notices a disconnect, and sends an answer or an error.

Our own server calls back when a client disconnects. Others report it through `receive()` only, so a task must call that: `while_present`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.request_state import RECORDED, RecordedAnswer
from pilotlight.edge_router.requests.function_hosts import OWN_HOST
from pilotlight.edge_router.requests.request import FUNCTIONS, Head, request_id_of
from pilotlight.wire.credentials import with_bearer
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.headers import REQUEST_ID
from pilotlight.wire.http.asgi import response_start
from pilotlight.wire.lines import as_lines
from pilotlight.wire.paths import with_deployment

Result = TypeVar("Result")

# A client that sends a body too large must be able to read the refusal: closing a connection with unread bytes resets it. So part of the rest of the
# body is read and discarded first.
DISCARD_TIMES = 8  # limit of the discarded bytes: this many times the body limit
DISCARD_S = 5.0
STALL_S = 60.0  # time for a client to read, if the server sets no limit


class DownstreamGone(Exception):
    """The client has disconnected."""


class ResponseWriter(Protocol):
    """The receiver of an answer: a client, or a request of a batch."""

    head: Head
    address: str  # the client's address; empty if unknown
    request_id: str

    @property
    def is_streaming(self) -> bool:
        """Tell whether an event stream has started, so that a failure becomes an event instead of a status."""

    def cut(self, error: ApiError) -> None: ...

    def look(self, now: float, awake_since: float) -> None:
        """Check the time limits (timeouts.py)."""

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None: ...

    async def write(self, batch: bytes) -> None: ...

    def write_now(self, batch: bytes) -> bool:
        """Send whole events if that needs no wait. Returns whether they were sent."""

    def note_last_event(self) -> None:
        """Record that the last event was sent: a client that leaves after it has its whole answer."""

    async def end_stream(self) -> None: ...

    async def refuse(self, error: ApiError) -> None: ...


class _BodyLimits(msgspec.Struct, frozen=True):
    silence_s: float
    total_s: float
    began_at: float  # on `time.monotonic`'s clock


class Downstream:
    """A client: its request's body, its presence, and its answer. `look` enforces time limits."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.head = head_of(scope)
        self.address = str(scope["client"][0]) if scope.get("client") else ""
        self.request_id = request_id_of(self.head)
        self.recorded: RecordedAnswer | None = scope.get(RECORDED)
        self.is_streaming = False
        self.has_answered = False
        self._named = partial(with_deployment, scope)
        self._receive = receive
        self._send = as_lines(send) if self.head.dialect is Dialect.OLLAMA else send
        # Methods that only our own server has (wire/http/exchange.py).
        self._now: Callable[[bytes], bool] | None = getattr(self._send, "now", None)
        self._watched_by: Callable[[Downstream | None], None] | None = getattr(send, "watched_by", None)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(self._loop)
        self._is_at_work = False  # the task runs work that `_end` may cancel
        self._has_cancelled = False  # `_end` has cancelled the work
        self._cancelled_before = 0  # the task's count of cancellations when its work began
        self._listening: asyncio.Task[None] | None = None
        self._ended: ApiError | DownstreamGone | None = None
        self._has_all = False  # the client has its whole answer
        self._waits_since: float | None = None  # since when the router waits for the client
        self._body_limits: _BodyLimits | None = None  # None unless the body is being read

    async def body(self, limit: int, silence_s: float, total_s: float, setting: str = "max_body_mib") -> bytes:
        """Return the body, with the model that its path names.

        Raises ApiError if it is larger than `limit` bytes, pauses or takes too long, and DownstreamGone if the client disconnects.
        `setting` is the name of the limit in the table [relay].
        """
        declared = self.head.header("content-length")
        if declared.isdigit() and int(declared) > limit:
            await self._refuse_body(int(declared), limit, silence_s, setting)
        self._raise_if_ended()
        parts: list[bytes] = []
        size, more = 0, True
        self._begin_work()
        self._body_limits = _BodyLimits(silence_s, total_s, time.monotonic())
        try:
            while more and size <= limit:
                self._waits_since = time.monotonic()
                part, more = await self._next_part()
                parts.append(part)
                size += len(part)
        except asyncio.CancelledError:
            self._raise_ended()
            raise
        finally:
            self._is_at_work, self._body_limits, self._waits_since = False, None, None
        if size > limit:
            parts.clear()
            await self._refuse_body(size, limit, silence_s, setting)
        return self._named(parts[0] if len(parts) == 1 else b"".join(parts))

    async def while_present(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the caller's task, so that nothing is computed for an absent client.
        Raises DownstreamGone when the client disconnects, and the ApiError of `cut`."""
        if self._ended is not None:
            work.close()
            self._raise_if_ended()
        self._begin_work()
        if self._watched_by is not None:
            self._watched_by(self)
        else:
            self._listening = self._loop.create_task(self._listen())
        try:
            result = await work
            # `_end` came after the work's last step: its cancellation is raised at the next await
            if self._has_cancelled:
                await asyncio.sleep(0)
            return result
        except asyncio.CancelledError:
            self._raise_ended()
            raise
        finally:
            self._is_at_work = False
            if self._watched_by is not None:
                self._watched_by(None)
            elif self._listening is not None:
                self._listening.cancel()

    def cut(self, error: ApiError) -> None:
        """Cancel the work; the client gets `error`. A recorded answer is left to another router."""
        if self.recorded is not None:
            self.recorded.response.leave()
        self._end(error)

    def look(self, now: float, awake_since: float) -> None:
        since, limits = self._waits_since, self._body_limits
        if since is None:
            return
        if limits is None:
            if now - max(since, awake_since) > STALL_S:
                self._end(DownstreamGone())
        elif now - max(limits.began_at, awake_since) >= limits.total_s:
            self._end(ApiError("request_timeout", f"the request's body took more than {limits.total_s:g} s"))
        elif now - max(since, awake_since) >= limits.silence_s:
            self._end(ApiError("request_timeout", f"the request's body paused for more than {limits.silence_s:g} s"))

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.has_answered = True
        await self._send(response_start(status, headers))
        self._has_all = True
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, body: bytes, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        told = [("content-type", "application/json"), ("content-length", str(len(body))), (REQUEST_ID, self.request_id)]
        await self.respond(status, [*headers, *told], body)

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.has_answered = self.is_streaming = True
        await self._send(response_start(status, headers))

    async def write(self, batch: bytes) -> None:
        """Send whole events. A client that does not read them is cut off by our own server, or by `look`."""
        self._waits_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": batch, "more_body": True})
        self._waits_since = None

    def write_now(self, batch: bytes) -> bool:
        """Send whole events, if the server can without a wait. Returns whether they were sent."""
        return self._now is not None and self._now(batch)

    def note_last_event(self) -> None:
        self._has_all = True

    async def end_stream(self) -> None:
        self._has_all = True
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ApiError) -> None:
        """Send an error in the dialect's form: status and body, or the last event of a stream."""
        if self.is_streaming:
            await self.write(error.event(self.head.dialect))
            await self.end_stream()
        elif not self.has_answered:
            body = orjson.dumps(error.body(self.head.dialect))
            await self.respond_json(body, error.status(self.head.dialect), error.headers())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone()

    def gone(self) -> None:
        """End the work: the client has disconnected."""
        if not self._has_all:  # a server reports a disconnect after the end of an answer, too
            self._end(DownstreamGone())

    def _begin_work(self) -> None:
        self._is_at_work = True
        self._cancelled_before = 0 if self._task is None else self._task.cancelling()

    def _end(self, why: ApiError | DownstreamGone) -> None:
        self._ended = self._ended or why
        if self._is_at_work and self._task is not None and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel()

    def _raise_ended(self) -> None:
        """Raise the reason of a cancellation if this object alone cancelled the task."""
        was_ours, self._has_cancelled = self._has_cancelled, False
        if was_ours and self._task is not None and self._task.uncancel() <= self._cancelled_before:
            self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        """Raise the reason of the end, as a new exception.

        A raised one refers to this object by its traceback. Kept here, it would be a cycle with all of the request, until a garbage collection.
        """
        match self._ended:
            case DownstreamGone():
                raise DownstreamGone from None
            case ApiError(word=word, message=message, retry_after_s=retry_after_s):
                raise ApiError(word, message, retry_after_s=retry_after_s) from None

    async def _next_part(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether more follows. Raises DownstreamGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise DownstreamGone
        return message.get("body", b""), message.get("more_body", False)

    async def _refuse_body(self, size: int, limit: int, silence_s: float, setting: str) -> None:
        waits_for_leave = self.head.header("expect").lower() == "100-continue"
        if not waits_for_leave and size <= DISCARD_TIMES * limit:
            await self._discard(DISCARD_TIMES * limit, silence_s)
        sentence = f"the body is larger than {limit / 2**20:g} MiB, the router's limit (relay.{setting})"
        raise ApiError("body_too_large", sentence)

    async def _discard(self, limit: int, silence_s: float) -> None:
        size, more = 0, True
        try:
            async with asyncio.timeout(min(DISCARD_S, silence_s)):
                while more and size < limit:
                    part, more = await self._next_part()
                    size += len(part)
        except TimeoutError:
            return  # the client keeps sending: close anyway


def head_of(scope: Scope) -> Head:
    given = scope["headers"] if scope["path"].startswith(FUNCTIONS) else with_bearer(scope["headers"])
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in given]
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (
        f"?{query.decode('latin-1')}" if query else ""
    )
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    is_websocket = scope["type"] == "websocket"
    if is_websocket:
        # the server answers these itself
        headers = [pair for pair in headers if not pair[0].startswith("sec-websocket-")]
        if scope["subprotocols"]:
            headers.append(("sec-websocket-protocol", ", ".join(scope["subprotocols"])))
    return Head(
        scope.get("method", "GET"),
        scope["path"],
        target,
        headers,
        scheme=scheme,
        is_websocket=is_websocket,
        is_at_own_host=scope.get(OWN_HOST, False),
    )
