"""fetch: a function's requests to other servers.

The runtime sends them under its egress policy, because this process has no network access.
"""

from collections.abc import Awaitable
from typing import Any

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import current_request
from pilotlight.functions.channel.failure import Failure
from workers import host
from workers.http.abort_signal import AbortedStream, AbortSignal, until_aborted
from workers.http.caches import Cache, kept_for_s
from workers.http.request import Request
from workers.http.response import Response, response_of
from workers.sockets.joints import Joint, asks_for_socket
from workers.sockets.websockets import ErrorEvent, Event, WebSocket

OF_FETCH = Cache("cf of fetch")  # responses kept by the `cf` option of `fetch`


async def fetch(resource: Any, options: Any = None, **named: Any) -> Response:
    """Send a request: `fetch(url_or_request, method=, headers=, body=, redirect=, signal=, cf=)`.
    The options may also be in a dict."""
    is_whole = isinstance(resource, Request) and not options and not named
    request = resource if is_whole else Request(resource, options, **named)
    if not request.cf or request.method != "GET" or asks_for_socket(request.headers):
        return await _fetched(request)
    key = str(request.cf.get("cacheKey") or request.url)
    if kept_for_s(request.cf, 200) == 0 or (found := await OF_FETCH.match_url(key, request.headers)) is None:
        response = await _fetched(request)
        if (ttl_s := kept_for_s(request.cf, response.status)) != 0:
            await OF_FETCH.keep(key, response, ttl_s)
        return response
    return found


async def _fetched(request: Request) -> Response:
    whole, stream = request.taken()
    headers, within = request.headers.multi_items(), current_request.get()
    further: dict[str, Any] = {"redirect": request.redirect}
    joint = Joint() if asks_for_socket(request.headers) else None
    if joint is not None:
        stream, further = joint.body, {**further, "websocket": True}
    sent = (str(request.method), request.url, headers, whole or b"", stream is not None)
    event = frames.FetchEvent(frames.UNNUMBERED, *sent, options=further, within=within)
    return await answered(host.channel().request(event, stream), joint, request.signal)


def connect(url: str, protocols: list[str]) -> WebSocket:
    """Return a WebSocket that is still connecting, like a browser's; its events report the result."""
    headers = [("upgrade", "websocket"), *([("sec-websocket-protocol", ", ".join(protocols))] if protocols else [])]
    joint, request = Joint(), Request(url, headers=headers)
    socket, within = joint.socket, current_request.get()
    socket.url = request.url
    socket.accept()
    sent = ("GET", request.url, request.headers.multi_items(), b"", True)
    options = {"redirect": "manual", "websocket": True}
    event = frames.FetchEvent(frames.UNNUMBERED, *sent, options=options, within=within)

    async def opened() -> None:
        try:
            response = await answered(host.channel().request(event, joint.body), joint)
        except Failure as failure:
            await socket._fire(ErrorEvent(socket, failure.message))
            return
        if response.status != 101:
            await socket._fire(ErrorEvent(socket, f"{url} answered {response.status} instead of switching"))
            return
        await socket._fire(Event("open", socket))

    socket._handle(opened())
    return socket


async def answered(asking: Awaitable[Any], joint: Joint | None, signal: AbortSignal | None = None) -> Response:
    """Await a response; `joint` is set for a WebSocket.
    An aborted signal raises its error here, or in the response's stream."""
    try:
        result = await (asking if signal is None else until_aborted(asking, signal))
    except BaseException:
        if joint is not None:
            joint.refused()
        raise
    if joint is not None and result.body is not None and result.value.get("web_socket"):
        headers = [tuple(pair) for pair in result.value["headers"]]
        socket = joint.opened(result.body)
        response = Response(None, 101, headers=headers, web_socket=socket, url=result.value.get("url", ""))
        socket.protocol = response.headers.get("sec-websocket-protocol", "")
        return response
    if joint is not None:
        joint.refused()
    body = result.body if signal is None or result.body is None else AbortedStream(result.body, signal)
    return response_of(result.value, body)
