"""The client's side of one request, as pure ASGI: read the body, notice when the client leaves, send an answer or a refusal.

Servers tell of a client's leaving through `receive()` only, so somebody must always be listening there: `while_present`. Knows nothing of sites.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import orjson
from starlette.types import Message, Receive, Scope, Send

from edge_router.request import Head, request_id_of
from wire.errors import ApiError
from wire.headers import REQUEST_ID
from wire.sse import encode_event

Result = TypeVar("Result")

# A client that sends a body too large must be able to read the refusal: closing on unread bytes resets the connection under it. So a bounded
# rest is read and thrown away first.
DISCARD_TIMES = 8  # of the limit
DISCARD_S = 5.0
STALL_S = 60.0  # for a client to take what waits for it, where the server sets no limit of its own


class ClientGone(Exception):
    """Nobody is listening any more."""


class ResponseWriter(Protocol):
    """To whom an answer is told: a client, or a recording."""

    head: Head
    address: str  # the client's; empty where it has none
    request_id: str
    is_streaming: bool  # an event stream has begun: a failure is an event now, no longer a status

    def cut(self, error: ApiError) -> None: ...

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None: ...

    async def write(self, batch: bytes) -> None: ...

    async def end_stream(self) -> None: ...

    async def refuse(self, error: ApiError) -> None: ...


class Downstream:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.head = head_of(scope)
        self.address = address_of(scope)
        self.request_id = request_id_of(self.head)
        self.is_streaming = False
        self.has_answered = False
        self._receive = receive
        self._send = send
        self._work: asyncio.Task[Any] | None = None  # that ends when the client leaves
        self._has_left = False
        self._has_ended = False  # the whole answer was sent
        self._cut: ApiError | None = None
        self._writing_since: float | None = None

    async def body(self, limit: int, silence_s: float, total_s: float) -> bytes:
        """Raises ApiError before more than `limit` bytes are held and for a client that pauses or takes too long, ClientGone when it leaves
        half-way."""
        declared = self.head.header("content-length")
        if declared.isdigit() and int(declared) > limit:
            await self._refuse_body(int(declared), limit, silence_s)
        parts: list[bytes] = []
        size, more = 0, True
        now = asyncio.get_running_loop().time
        deadline = now() + total_s
        try:
            async with asyncio.timeout(min(silence_s, total_s)) as pause:
                while more:
                    message = await self._next_part()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        break
                    if more:
                        pause.reschedule(min(now() + silence_s, deadline))
        except TimeoutError:
            if now() >= deadline:
                raise ApiError("request_timeout", f"the request's body took more than {total_s:g} s") from None
            raise ApiError("request_timeout", f"the request's body paused for more than {silence_s:g} s") from None
        if size > limit:
            parts.clear()
            await self._refuse_body(size, limit, silence_s)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def while_present(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`, in the caller's own task, until it is done, the client leaves (ClientGone) or it is cut (the ApiError given there). A second
        task does nothing but listen."""
        if self._cut is not None:
            work.close()
            raise self._cut
        self._work = asyncio.current_task()
        assert self._work is not None
        listening = asyncio.create_task(self._listen())
        try:
            return await work
        except asyncio.CancelledError:
            if self._cut is None and not self._has_left:
                raise  # not ours
            self._work.uncancel()
            raise self._cut or ClientGone from None
        finally:
            self._work = None
            listening.cancel()

    def cut(self, error: ApiError) -> None:
        """End the work from outside; the client is told `error`."""
        self._cut = error
        if self._work is not None:
            self._work.cancel()

    def look(self, now: float, awake_since: float) -> None:
        if self._writing_since is not None and now - self._writing_since > STALL_S:
            self._leave()

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.has_answered = True
        await self._start(status, headers)
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.has_answered = self.is_streaming = True
        await self._start(status, headers)

    async def write(self, batch: bytes) -> None:
        """Send whole events. A client that does not read them is cut off by our own server, or by `look`."""
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": batch, "more_body": True})
        self._writing_since = None

    async def end_stream(self) -> None:
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ApiError) -> None:
        """In the dialect's shape: a status and a body, or inside a stream the last event."""
        body = orjson.dumps(error.body(self.head.dialect))
        if self.is_streaming:
            await self.write(encode_event(body))
            await self.end_stream()
        elif not self.has_answered:
            headers = [*error.headers(), ("content-type", "application/json"), (REQUEST_ID, self.request_id)]
            headers.append(("content-length", str(len(body))))
            await self.respond(error.status(self.head.dialect), headers, body)

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._has_ended:  # behind the answer's end a server says the same
            self._leave()

    def _leave(self) -> None:
        self._has_left = True
        if self._work is not None:
            self._work.cancel()

    async def _next_part(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def _refuse_body(self, size: int, limit: int, silence_s: float) -> None:
        waits_for_leave = self.head.header("expect").lower() == "100-continue"
        if not waits_for_leave and size <= DISCARD_TIMES * limit:
            await self._discard(DISCARD_TIMES * limit, silence_s)
        sentence = f"the body is larger than {limit / 2**20:g} MiB: shorten the prompt or raise relay.max_body_mib"
        raise ApiError("body_too_large", sentence)

    async def _discard(self, limit: int, silence_s: float) -> None:
        size, more = 0, True
        try:
            async with asyncio.timeout(min(DISCARD_S, silence_s)):
                while more and size < limit:
                    message = await self._next_part()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return  # it had its chance


def address_of(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def head_of(scope: Scope) -> Head:
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (
        f"?{query.decode('latin-1')}" if query else ""
    )
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    is_websocket = scope["type"] == "websocket"
    if is_websocket:
        headers = [pair for pair in headers if not pair[0].startswith("sec-websocket-")]  # a server's own to answer
        if scope["subprotocols"]:
            headers.append(("sec-websocket-protocol", ", ".join(scope["subprotocols"])))
    return Head(scope.get("method", "GET"), scope["path"], target, headers, scheme=scheme, is_websocket=is_websocket)
