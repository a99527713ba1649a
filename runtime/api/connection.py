"""Send a site's responses: JSON, marked errors, and streams of events. See also wire/http/asgi.py.

These are plain ASGI callables. Middleware that buffers a response, or checks for a disconnect only when sending, would hide that a client has left.
The HTTP server (wire/http/connection.py) treats a client that closes only its sending half as gone, so a client must keep its side open until it has
the response.
"""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from pilotlight.support import background
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.continuation import DRAIN_NOTICE
from pilotlight.wire.hop.headers import REFUSAL, REFUSALS
from pilotlight.wire.http.asgi import Headers, read_body, response_start, send_json
from pilotlight.wire.sse import CONTENT_TYPE, HEARTBEAT


class AnswerCut(Exception):
    """A response that started and cannot be finished; the connection is closed without a further message."""


BodyT = TypeVar("BodyT")


async def read_json(request: Request, kind: type[BodyT], limit_bytes: int, expected: str) -> BodyT:
    """Decode a JSON body sent by another part of the network.

    Raises ApiError; if the body cannot be decoded, the error's message starts with `expected`."""
    raw = await read_body(request.scope, request.receive, limit_bytes)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError("malformed_json", f"{expected}: {error}") from None


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


async def send_error(send: Send, error: ApiError, dialect: Dialect) -> None:
    """Send an error. A header marks it for routers if another site may succeed."""
    marked = [(REFUSAL, error.word)] if error.word in REFUSALS else []
    await send_json(send, error_body(error, dialect), error.status(dialect), [*error.headers(), *marked])


def answering(scope: Scope, send: Send) -> Send:
    """Return a `send` that accepts the messages of an HTTP response.

    For a WebSocket handshake it converts them to a refusal (ASGI's extension `websocket.http.response`)."""
    if scope["type"] != "websocket":
        return send

    async def renamed(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return renamed


def error_body(error: ApiError, dialect: Dialect) -> bytes:
    return orjson.dumps(error.body(dialect))


class EventWriter:
    """A stream of server-sent events with heartbeats, and a notice for the router when a drain starts.

    After the notice the router may continue the stream at another site. The response starts with the first event, so an earlier refusal can still set
    the status. Use as `async with`.
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
        """Add headers. This has no effect once the response has started, and a heartbeat can start it."""
        if not self.started.is_set():
            self._headers += headers

    async def __aenter__(self) -> "EventWriter":
        self._last_sent = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._beat(), name="heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await background.stop(self._task)  # a failed heartbeat means that the client has disconnected

    async def write(self, events: bytes) -> None:
        async with self._lock:
            if not self.started.is_set():
                self.started.set()
                await self._send(response_start(200, self._headers))
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._last_sent = asyncio.get_running_loop().time()

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()  # no heartbeat may follow the end
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
            self._drains = asyncio.Event()  # a new event that is never set, so that the notice is sent only once
