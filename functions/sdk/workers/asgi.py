"""ASGI applications in a function: `await asgi.fetch(app, request, env)`.

Responses and WebSockets are streamed; lifespan runs once per application. Implements version 3.0 of the ASGI specification.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from workers.entrypoint import Context
from workers.gateway import BaseOptions, prefix_of
from workers.http.request import Request
from workers.http.response import Response
from workers.sockets.asgi_socket import Socket
from workers.sockets.joints import asks_for_socket
from workers.trouble import log_trouble

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

_lifespans: dict[int, "_Lifespan"] = {}


class Options(BaseOptions):
    """Options of `fetch`."""


async def fetch(
    app: App, request: Request, env: Any = None, ctx: Any = None, options: BaseOptions | None = None
) -> Response:
    """Call an application and return its response.
    An exception before the response's start is raised; a later one breaks off the stream."""
    lifespan = _lifespans.get(id(app))
    if lifespan is None:
        lifespan = _lifespans[id(app)] = _Lifespan(app)
    await lifespan.started()
    scope = request_to_scope(request, env, ctx, dict(lifespan.state))
    context = ctx if isinstance(ctx, Context) else Context()
    if asks_for_socket(request.headers):
        return await Socket(scope, context).response(app)
    exchange = _Exchange(request, context)
    exchange.run(app, scope)
    return await exchange.response()


class _Lifespan:
    """The lifespan of an application.
    One that does not support lifespan raises or returns, which is ignored."""

    def __init__(self, app: App) -> None:
        self.app = app  # keeps the application alive, so that its id is not reused
        self.state: dict[str, Any] = {}
        self._started: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run())

    async def started(self) -> None:
        failure = await asyncio.shield(self._started)
        if failure is not None:
            raise RuntimeError(f"the application failed to start: {failure}")

    async def _run(self) -> None:
        started = False

        async def receive() -> Message:
            nonlocal started
            if not started:
                started = True
                return {"type": "lifespan.startup"}
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never: the process is killed instead

        async def send(message: Message) -> None:
            if not self._started.done():
                failed = message["type"] == "lifespan.startup.failed"
                self._started.set_result((message.get("message") or "it gives no reason") if failed else None)

        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        with suppress(Exception):  # by the specification, an exception here means that lifespan is not supported
            await self.app(scope, receive, send)
        if not self._started.done():
            self._started.set_result(None)


class _Exchange:
    """One request to an application, and its response; iterating yields the chunks of a streamed response.
    The response ends with the last `http.response.body`; the application may continue in the background (`waitUntil`)."""

    def __init__(self, request: Request, context: Context) -> None:
        self._body, self._stream = request.taken()
        self._context = context
        self._is_head = request.method == "HEAD"
        self._is_complete = False  # whether the application has sent its whole response
        self._has_sent_body = False
        self._gone = asyncio.Event()
        self._head: asyncio.Future[tuple[int, list[tuple[str, str]]]] = asyncio.get_running_loop().create_future()
        # This queue holds only one chunk, so the application waits for the reader.
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._status, self._headers = 0, list[tuple[str, str]]()
        self._whole: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self, app: App, scope: MutableMapping[str, Any]) -> None:
        self._task = asyncio.ensure_future(self._run(app, scope))

    async def response(self) -> Response:
        assert self._task is not None
        try:
            status, headers = await self._head
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._whole is not None:
            self._run_on()
            bodiless = status in (101, 204, 205, 304)
            return Response(None if bodiless else self._whole, status, headers=headers, encode_body="manual")
        return Response(self, status, headers=headers, encode_body="manual")

    def __aiter__(self) -> "_Exchange":
        return self

    async def __anext__(self) -> bytes:
        assert self._task is not None
        piece = await self._pieces.get()
        if piece is not None:
            return piece
        if not self._is_complete:
            await self._task  # wait for its return, or for the exception that broke off the stream
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the response. Cancel the application if it has not sent all; otherwise let it continue."""
        if self._gone.is_set():
            return
        self._gone.set()
        if self._is_complete:
            self._run_on()
        elif self._task is not None:
            self._task.cancel()

    def _run_on(self) -> None:
        if self._task is not None and not self._task.done():
            self._context.wait_until(self._task)

    async def _run(self, app: App, scope: MutableMapping[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
            if not self._head.done():
                raise RuntimeError("the application returned without a response")
        except Exception as error:
            if not self._head.done():
                # Without a handler Python would print it, and the raised exception is printed, too.
                if logging.getLogger("asgi").hasHandlers():
                    log_trouble("ASGI request failed", error)
                self._head.set_exception(error)
                return
            if self._is_complete:  # a framework that sent a 500 raises afterwards, for the log
                log_trouble("Exception in ASGI application after response started", error)
                return
            raise
        finally:
            if not self._is_complete and not self._gone.is_set():
                await self._pieces.put(None)

    async def _receive(self) -> Message:
        if self._has_sent_body:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        if self._stream is not None:
            try:
                return {"type": "http.request", "body": await self._stream.__anext__(), "more_body": True}
            except StopAsyncIteration:
                self._body = b""
        self._has_sent_body = True
        return {"type": "http.request", "body": self._body or b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (bytes(name).decode("latin-1"), bytes(value).decode("latin-1"))
                for name, value in message.get("headers", ())
            ]
            self._status, self._headers = message["status"], headers
            return
        if message["type"] != "http.response.body":
            raise ValueError(f"the application sent {message['type']!r}, which is not part of an HTTP response")
        body, more = bytes(message.get("body", b"")), bool(message.get("more_body", False))
        if not self._status:
            raise RuntimeError("the application sent a body before http.response.start")
        if self._is_complete:
            raise RuntimeError("the application sent more of a body that was complete")
        self._is_complete = not more
        if not self._head.done():
            if not more or self._is_head:
                self._whole = b"" if self._is_head else body
            self._head.set_result((self._status, self._headers))
        if self._whole is not None:
            return
        if self._gone.is_set():
            raise OSError("the client has left")
        if body:
            await self._pieces.put(body)
        if not more:
            await self._pieces.put(None)


def request_to_scope(
    request: Request, env: Any = None, ctx: Any = None, state: dict[str, Any] | None = None
) -> MutableMapping[str, Any]:
    """Return the ASGI scope of a request.
    Below a prefix of a shared host, `root_path` is the prefix and `path` begins with it."""
    parts, prefix = urlsplit(request.url), prefix_of(request)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.multi_items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},  # since 2.4 `send` raises OSError after the client has left
        "http_version": "1.1",
        "method": str(request.method),
        "scheme": parts.scheme or "http",
        "path": prefix + (unquote(parts.path) or "/"),
        "raw_path": prefix.encode() + (parts.path.encode() or b"/"),
        "query_string": parts.query.encode(),
        "root_path": prefix,
        "headers": headers,
        "server": (parts.hostname or "localhost", port),
        "client": (request.headers.get("cf-connecting-ip", "127.0.0.1"), 0),
        "state": {} if state is None else state,
        "env": env,
        "ctx": ctx,
    }


def run_in_background(awaitable: Awaitable[Any]) -> None:
    """Continue work after the response. Exceptions are logged."""

    async def logged() -> None:
        try:
            await awaitable
        except Exception as error:
            log_trouble("Unhandled exception in background task", error)

    Context().wait_until(logged())
