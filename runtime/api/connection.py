"""Both ends of one HTTP exchange: read the body, watch for a disconnect, send a response.

ASGI callables only: middleware that buffers a response, or checks for the disconnect only when sending, hides that a client has left. The HTTP server
(wire/http/connection.py) also reports a client that closes only its sending half as gone: a client must keep its side open until it has the
response.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.continuation import DRAIN_NOTICE
from pilotlight.wire.hop.headers import REFUSAL, REFUSALS
from pilotlight.wire.sse import CONTENT_TYPE, HEARTBEAT

BODY_TIMEOUT_S = 60.0  # for the whole body: 140 kB/s for the largest one a site takes by default

Headers = Iterable[tuple[str, str]]


class AnswerCut(Exception):
    """A response that started and cannot be finished; the connection is closed without a further message."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read a whole body.

    A body that exceeds the limit or does not end is refused while it arrives. Raises ApiError, ClientDisconnect.

    A longer one than the limit, or one that never ends, is refused while it is coming in. Raises ApiError, ClientDisconnect.
    """
    encoding = header(scope, "content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise ApiError("invalid_request", "a request body must not be compressed; drop the content-encoding header")
    declared = header(scope, "content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    chunks, total, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunks.append(message.get("body", b""))
                total += len(chunks[-1])
                if total > limit_bytes:
                    raise too_large(limit_bytes)
                more = message.get("more_body", False)
    except TimeoutError:
        sentence = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it faster or send less"
        raise ApiError("request_timeout", sentence) from None
    return b"".join(chunks)


BodyT = TypeVar("BodyT")


async def read_json(request: Request, kind: type[BodyT], limit_bytes: int, expected: str) -> BodyT:
    """Decode a body sent by another part of the network.

    Raises ApiError whose message starts with `expected`."""
    raw = await read_body(request.scope, request.receive, limit_bytes)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError("malformed_json", f"{expected}: {error}") from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await the work in the caller's task; cancel it when the client disconnects.

    Returns after the work's scopes are left."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect")
    try:
        await work
    except asyncio.CancelledError:
        if not has_left or task.cancelling() > 1:  # cancelled by another task
            raise
    finally:
        watcher.cancel()
        if has_left:
            task.uncancel()


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


async def send_json(send: Send, body: bytes, status: int = 200, headers: Headers = ()) -> None:
    pairs = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    await send(response_start(status, pairs))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, dialect: Dialect) -> None:
    """Send an error with a header that marks it as the site's own; a router trusts this header."""
    marked = [(REFUSAL, error.word)] if error.word in REFUSALS else []
    await send_json(send, error_body(error, dialect), error.status(dialect), [*error.headers(), *marked])


def answering(scope: Scope, send: Send) -> Send:
    """Return a `send` for an HTTP response.

    For a WebSocket's handshake it refuses the upgrade (ASGI's extension `websocket.http.response`)."""
    if scope["type"] != "websocket":
        return send

    async def renamed(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return renamed


def error_body(error: ApiError, dialect: Dialect) -> bytes:
    return orjson.dumps(error.body(dialect))


def response_start(status: int, headers: Headers) -> Message:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def header(scope: Scope, name: str) -> str | None:
    """Return the first header of that (lower-case) name."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return bytes(value).decode("latin-1")
    return None


def too_large(limit_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than this site's limit of {limit_bytes} bytes; send less")


class EventWriter:
    """A stream of server-sent events with heartbeats, and a notice for the router when a drain starts.

    After the notice the router may continue the stream at another site. The response has no status until the first event is sent, so a refusal can
    still set its own. Use as `async with`.
    """

    HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))

    def __init__(
        self, send: Send, heartbeat_s: float, headers: Headers = (), drains: asyncio.Event | None = None
    ) -> None:
        """`drains` is set when the site starts to drain; None if no router is notified."""
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._drains = drains or asyncio.Event()
        self._lock = asyncio.Lock()
        self._last_sent = 0.0
        self._task: asyncio.Task[None] | None = None
        self._headers = [("content-type", CONTENT_TYPE), *self.HEADERS, *headers]
        self.started = asyncio.Event()

    def add_headers(self, headers: Headers) -> None:
        """Add headers, unless the response has started (a heartbeat may have been first)."""
        if not self.started.is_set():
            self._headers += headers

    async def __aenter__(self) -> "EventWriter":
        self._last_sent = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._beat(), name="heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # a failed heartbeat means that the client has disconnected
            await self._task

    async def write(self, events: bytes) -> None:
        async with self._lock:
            if not self.started.is_set():
                self.started.set()
                await self._send(response_start(200, self._headers))
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._last_sent = asyncio.get_running_loop().time()

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()  # nothing may follow the end
        async with self._lock:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self) -> None:
        while True:
            next_at = self._last_sent + self._heartbeat_s
            if next_at <= asyncio.get_running_loop().time():
                await self.write(HEARTBEAT)
                continue
            try:
                async with asyncio.timeout_at(next_at):
                    await self._drains.wait()
                    await self.started.wait()
            except TimeoutError:
                continue
            await self.write(DRAIN_NOTICE)
            self._drains = asyncio.Event()  # the notice is sent once
