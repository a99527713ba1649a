"""/fn/NAME/PATH: HTTP requests and WebSockets to a function, streamed in both directions.

If the client disconnects, the function's work is cancelled. The function sees its URL at the root of its host, as on the platform; the header
x-pilotlight-prefix has the path below which it is served.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol
from urllib.parse import unquote

import orjson
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.host.answer_headers import confined_headers
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.network.socket_relay import SocketRelay
from pilotlight.functions.host.pool import FunctionPool
from pilotlight.functions.host.site_functions import Response, SiteFunctions
from pilotlight.functions.routes.error_page import send_error_page, wants_page
from pilotlight.runtime.api.connection import AnswerCut, answering
from pilotlight.runtime.api.middleware import GENUINE_HOP, SITE_NAME
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.headers import (
    CLIENT_ADDRESS,
    CLIENT_GEO,
    CLIENT_ORIGIN,
    HOP_BY_HOP,
    OURS,
    OWN_HOST,
    REQUEST_ID,
)
from pilotlight.wire.http.asgi import header, response_start, send_json
from pilotlight.wire.paths import without_dot_segments

BODY_IN_ONE = 64 << 10  # a smaller body with a known length is sent together with its request
LIMITS = frozenset({"cpu_time", "memory", "blocked", "wall_time", "start_time", "response_too_large"})
MIB = 1 << 20
STUCK_S = 0.25
MAX_AHEAD_BYTES = 4 * MIB

log = logging.getLogger("pilotlight.function")

VersionOf = Callable[[str, Scope], Awaitable[FunctionPool]]
"""Returns the version of a function that answers a request. Raises Failure."""


class AdmissionGate(Protocol):
    """The part of the site's admission (runtime/generation/admission.py) that functions use."""

    def permit(self) -> AbstractContextManager[Any]:
        """Return a scope with a permit for one request. Raises ApiError if there is none."""

    def attachment(self) -> AbstractContextManager[None]:
        """Return a scope for an open WebSocket, which needs no permit but delays a drain."""

    async def until_draining(self) -> None: ...


class FunctionRoute:
    """An ASGI application that sends requests to functions.
    `name` is the function for every path; None takes the name from the path."""

    def __init__(
        self,
        functions: SiteFunctions,
        version_of: VersionOf,
        admission: AdmissionGate,
        *,
        show_errors: bool,
        name: str | None = None,
    ) -> None:
        self._functions = functions
        self._version_of = version_of
        self._admission = admission
        self._limit = int(functions.limits.request_mib * MIB)
        self._show_errors = show_errors
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._socket(scope, receive, send)
        with self._admission.permit():
            await self._exchange(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. It holds a request's permit only until it is open."""
        await receive()  # websocket.connect
        relay = SocketRelay(receive, send, self._functions.limits)
        with self._admission.permit():
            stream = await relay.while_present(self._switched(scope, relay.messages(), send))
        if stream is None:
            relay.drop()
        else:
            with self._admission.attachment():
                await relay.run(stream, self._admission.until_draining())

    async def _switched(self, scope: Scope, messages: AsyncIterator[bytes], send: Send) -> AsyncIterator[bytes] | None:
        """Open the function's WebSocket and return its messages; None if the client got another response."""
        name, answer = self._name or scope["path_params"]["name"], answering(scope, send)
        try:
            version, event = await self._version_of(name, scope), self._event(scope, name, "GET")
            event.headers.extend([("connection", "Upgrade"), ("upgrade", "websocket")])
            response = self._told(await self._functions.fetch(version, event, messages, is_socket=True), name, scope)
            if response.status != 101:
                await _send(response, "GET", answer)
                return None
        except Fault as fault:
            await self._tell(fault, scope, answer)
            return None
        except Failure as failure:
            raise _refusal(failure) from None
        await _accept(response, scope, send)
        return response.stream

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._name or scope["path_params"]["name"]
        body = await self._body(scope, receive)
        watching: asyncio.Future[None] | None = None
        if isinstance(body, bytes):  # for a streamed body, `until_gone` below watches
            watching = asyncio.ensure_future(_until_gone(receive))
        work = asyncio.ensure_future(self._answer(name, scope, body, send))
        if isinstance(body, UploadStream):
            watching = asyncio.ensure_future(body.until_gone())
        assert watching is not None
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            work.result()
        finally:
            for task in (work, watching):
                task.cancel()
            await asyncio.gather(work, watching, return_exceptions=True)

    async def _answer(self, name: str, scope: Scope, body: "bytes | UploadStream", send: Send) -> None:
        started = False
        try:
            version = await self._version_of(name, scope)
            whole, stream = (body, None) if isinstance(body, bytes) else (b"", aiter(body))
            event = self._event(scope, name, scope["method"], whole)
            with version.held():  # the version may be replaced while the file is opened
                response = await self._functions.static(version, event)
                if response is not None and self._is_below(scope):
                    response = _below(response, f"/fn/{name}")
                if response is None:
                    response = await self._functions.fetch(version, event, stream)
            started = True
            sending = send if isinstance(body, bytes) else body.beside(send)
            await _send(self._told(response, name, scope), scope["method"], sending)
        except Fault as fault:
            if started:
                # the server then closes the connection, so the client sees that the response is incomplete
                raise AnswerCut from None
            await self._tell(fault, scope, send)
        except Failure as failure:
            if started:
                log.warning("a response of %s was cut off: %s", name, failure.message)
                raise AnswerCut from None
            raise _refusal(failure) from None

    def _event(self, scope: Scope, name: str, method: str, body: bytes = b"") -> FetchEvent:
        """Return the request as an event for the function."""
        headers = _headers(scope, self._is_below(scope), name)
        return FetchEvent(UNNUMBERED, method, self._url(scope, name), headers, body, options={"cf": _cf(scope)})

    def _is_below(self, scope: Scope) -> bool:
        """Tell whether the client reaches the function at /fn/NAME on a shared host.
        Only a router's header is trusted."""
        is_at_own_host = scope.get(GENUINE_HOP, False) and header(scope, OWN_HOST) is not None
        return self._name is None and not is_at_own_host

    def _told(self, response: Response, name: str, scope: Scope) -> Response:
        """Return the response; on a shared host, its headers are confined to the function's path."""
        if not self._is_below(scope):
            return response
        return response._replace(headers=confined_headers(response.headers, f"/fn/{name}"))

    async def _tell(self, fault: Fault, scope: Scope, send: Send) -> None:
        """Send the client an error response.
        The client gets the reason only if the site shows errors; the author gets it in any case."""
        word = "function_limit" if fault.code in LIMITS else "function_failed"
        sentence = (
            f"{fault.name}: {fault.message}" if self._show_errors else "the function failed; its log has the reason"
        )
        error = ApiError(word, sentence)
        if wants_page(scope):
            return await send_error_page(send, error, fault, shows_detail=self._show_errors)
        fields = error.body(Dialect.OPENAI)
        if self._show_errors and fault.detail:
            fields["error"]["traceback"] = fault.detail.splitlines()
        await send_json(send, orjson.dumps(fields), error.status(Dialect.OPENAI))

    async def _body(self, scope: Scope, receive: Receive) -> "bytes | UploadStream":
        declared = header(scope, "content-length")
        length = int(declared) if declared is not None and declared.isdigit() else None
        if length is not None and length > self._limit:
            raise ApiError("body_too_large", f"functions of this site take at most {self._limit} bytes")
        if length is None and header(scope, "transfer-encoding") is None and scope["http_version"][:1] == "1":
            length = 0
        if length is None or length > BODY_IN_ONE:
            return UploadStream(receive, self._limit)
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    def _url(self, scope: Scope, name: str) -> str:
        """Return the function's URL. Raises ApiError if a slash around the function's name is encoded."""
        raw = scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
        if self._name is None:
            segments = raw.split("/", 3)
            if [unquote(each) for each in segments[1:3]] != ["fn", name]:
                sentence = f"{raw[:100]} names no function: a function is at /fn/NAME, and its name has no slash (%2F)"
                raise ApiError("function_not_found", sentence)
            raw = "/" + "".join(segments[3:])
        query = scope.get("query_string", b"").decode("latin-1")
        return f"{_origin(scope)}{without_dot_segments(raw)}" + (f"?{query}" if query else "")


class UploadStream:
    """A request's body as it arrives; also notices the client's disconnect."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._gone = asyncio.Event()
        self._read = asyncio.Event()
        self._ahead: deque[Message] = deque()
        self._ahead_bytes = 0
        self._taking = asyncio.Lock()

    async def until_gone(self) -> None:
        """Wait until the client disconnects. While the body arrives, its reader notices the disconnect."""
        reading = asyncio.ensure_future(self._read.wait())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            gone.cancel()
        if not self._gone.is_set():
            await _until_gone(self._receive)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, more = 0, True
        while more:
            async with self._taking:
                message = await self._next()
            if message["type"] == "http.disconnect":
                self._gone.set()
                raise Failure("the client left before it had sent its body", code="cancelled", status=499)
            chunk = message.get("body", b"")
            size += len(chunk)
            more = message.get("more_body", False)
            if size > self._limit:
                raise Failure(
                    f"functions of this site take at most {self._limit} bytes", code="body_too_large", status=413
                )
            if chunk:
                yield chunk
        self._read.set()

    async def _next(self) -> Message:
        if not self._ahead:
            return await self._receive()
        message = self._ahead.popleft()
        self._ahead_bytes -= len(message.get("body", b""))
        return message

    def beside(self, send: Send) -> Send:
        """Return a `send` for a response to a client whose body is still arriving.

        A client that does not read its response may fill both directions; its disconnect is then queued after unread parts of its body. So while
        `send` is stuck, a limited part of the body is read ahead.
        """

        async def sending(message: Message) -> None:
            if self._read.is_set():
                return await send(message)
            ahead = asyncio.ensure_future(self._look_ahead())
            try:
                await send(message)
            finally:
                ahead.cancel()

        return sending

    async def _look_ahead(self) -> None:
        while not self._read.is_set() and self._ahead_bytes < MAX_AHEAD_BYTES:
            await asyncio.sleep(STUCK_S)
            async with self._taking:
                if self._read.is_set():
                    return
                message = await self._receive()
                self._ahead.append(message)
                self._ahead_bytes += len(message.get("body", b""))
            if message["type"] == "http.disconnect":
                return self._gone.set()
            if not message.get("more_body", False):
                return  # the task that waits for the disconnect reads the rest


class _Rest(Convertor[str]):
    """A path convertor for the whole rest of a path.
    Starlette's `path` ends at a line feed, which a client may send."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _FunctionName(_Rest):
    regex = "[^/@][^/]*"  # /fn/@org/model is a model of Workers AI


register_url_convertor("rest", _Rest())
register_url_convertor("function", _FunctionName())


def at_path(route: FunctionRoute, path: str) -> list[BaseRoute]:
    """Return routes for requests of all methods and for WebSockets."""
    return [kind(path, route) for kind in (Route, WebSocketRoute)]


async def _send(response: Response, method: str, send: Send) -> None:
    # A HEAD response has no body whose bytes could be counted, so the function declares the length.
    is_untold = response.stream is not None or (method == "HEAD" and not response.body)
    dropped = (REQUEST_ID,) if is_untold else ("content-length", REQUEST_ID)
    headers = [pair for pair in response.headers if pair[0] not in dropped]
    bodiless = response.status in (204, 205, 304) or response.status < 200
    if response.stream is None:
        if not (bodiless or is_untold):
            headers.append(("content-length", str(len(response.body))))
        await send(response_start(response.status, headers))
        await send({"type": "http.response.body", "body": b"" if bodiless or method == "HEAD" else response.body})
        return
    aclose = getattr(response.stream, "aclose", None)
    try:
        await send(response_start(response.status, headers))
        async for chunk in response.stream:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        if aclose is not None:
            await aclose()


async def _accept(response: Response, scope: Scope, send: Send) -> None:
    headers = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers
        if name not in ("content-length", REQUEST_ID) and not name.startswith("sec-websocket-")
    ]
    subprotocol = next((value for name, value in response.headers if name == "sec-websocket-protocol"), None)
    if subprotocol is not None and subprotocol not in scope["subprotocols"]:
        offered = ", ".join(scope["subprotocols"]) or "none"
        sentence = f"the function chose the subprotocol {subprotocol!r}; the client offers {offered}"
        raise ApiError("function_failed", sentence)
    await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers})


def _below(response: Response, prefix: str) -> Response:
    """Prefix the location of an asset's redirect with the path below which the files are served."""
    return response._replace(
        headers=[
            (key, prefix + value if key == "location" and value.startswith("/") and value[:2] != "//" else value)
            for key, value in response.headers
        ]
    )


def _origin(scope: Scope) -> str:
    """Return the scheme and host that the client used, as the router reports them for its requests."""
    told = header(scope, CLIENT_ORIGIN) if scope.get(GENUINE_HOP, False) else None
    if told is not None and not told.endswith("://"):
        return told
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    return f"{scheme}://{header(scope, 'host') or 'localhost'}"


def _headers(scope: Scope, is_below: bool, name: str) -> list[tuple[str, str]]:
    pairs = [(key.decode("latin-1").lower(), value.decode("latin-1")) for key, value in scope["headers"]]
    kept = [pair for pair in pairs if pair[0] not in HOP_BY_HOP and not pair[0].startswith(OURS)]
    host = _origin(scope).partition("://")[2]
    kept = [(key, host if key == "host" else value) for key, value in kept]
    client = scope.get("client")
    if client is not None and not scope.get(GENUINE_HOP, False):  # only a router's header is trusted
        kept = [*(pair for pair in kept if pair[0] != CLIENT_ADDRESS), (CLIENT_ADDRESS, str(client[0]))]
    if is_below:
        kept.append(("x-pilotlight-prefix", f"/fn/{name}"))
    if (request_id := _request_id(scope)) is not None:
        kept = [*(pair for pair in kept if pair[0] != REQUEST_ID), (REQUEST_ID, request_id)]
    return kept


def _cf(scope: Scope) -> dict[str, str]:
    """Return fields of `request.cf`: the site, the HTTP version and, from a router, the client's location."""
    name = str(scope.get(SITE_NAME, ""))
    known = {"colo": "".join(filter(str.isalpha, name)).upper(), "httpProtocol": f"HTTP/{scope['http_version']}"}
    place = header(scope, CLIENT_GEO) if scope.get(GENUINE_HOP, False) else None
    if place is not None and place.count(",") == 1:
        known["latitude"], known["longitude"] = place.split(",")
    return known


def _request_id(scope: Mapping[str, object]) -> str | None:
    value = scope.get("pilotlight.request_id")
    return value if isinstance(value, str) else None


def _refusal(failure: Failure) -> ApiError:
    if failure.status == 404:
        return ApiError("function_not_found", failure.message)
    if failure.status == 421:
        return ApiError("misdirected_request", failure.message)
    if failure.status == 503:
        return ApiError("overloaded", failure.message, retry_after_s=failure.retry_after_s)
    if failure.status == 413:
        return ApiError("body_too_large", failure.message)
    return ApiError("function_failed", failure.message)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
