"""WebSockets through the router: a handshake like any request to a function, then messages.

If a site refuses the handshake, the next site is tried, or the refusal is forwarded if the request is at fault. After the handshake nothing is
retried, because the router does not know which messages were processed. An open WebSocket is not a request in progress: it counts as a connection.
Plain ASGI towards the client.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from starlette.types import Message, Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.edge_router.forwarding.upstream import UpstreamResponse
from pilotlight.edge_router.requests.request import FUNCTIONS
from pilotlight.edge_router.routing.views import Preference
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import REQUEST_ID, ROUTE
from pilotlight.wire.http.client import SWITCHING_PROTOCOLS
from pilotlight.wire.http.websocket import (
    ABNORMAL,
    FAILED,
    GOING_AWAY,
    RESTARTING,
    SocketTimings,
    WebSocket,
    WebSocketClose,
)

MAX_MESSAGE_BYTES = 32 << 20  # limit of a site's message; the server limits a client's

log = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]


class WebSocketRelay:
    """An ASGI application for all WebSockets."""

    def __init__(self, proxy: Proxy, timings: SocketTimings) -> None:
        """`timings` are those of WebSockets to sites."""
        self._proxy, self._timings = proxy, timings
        self._open: set[Tunnel] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        client = Downstream(scope, _until_disconnect(receive), _instead_of_a_websocket(send))
        handshake = _Handshake(self._proxy, client, self._timings)
        await self._proxy.handle(client, handshake.run())
        if handshake.accepted is None:
            return
        site, upstream, headers = handshake.accepted
        tunnel = Tunnel(site, upstream, receive, send, self._proxy.config.idle_timeout_s)
        self._open.add(tunnel)
        try:
            await send(_accept(headers))
            why = await tunnel.run()
            log.info("request %s: the WebSocket at %s ended: %s", client.request_id, site, why)
        finally:
            upstream.close(GOING_AWAY)
            self._open.discard(tunnel)

    def end(self) -> None:
        """Close all WebSockets with a code that makes clients reconnect to another router.
        Call it after the open requests have ended: a WebSocket has no end to wait for."""
        for tunnel in self._open:
            tunnel.stopping.set()


class _Accepted(NamedTuple):
    site: str
    upstream: WebSocket
    headers: Pairs


class _Handshake:
    """A handshake, which is sent to sites like any request.
    Afterwards the client has a plain response, or `accepted` is set."""

    def __init__(self, proxy: Proxy, client: Downstream, timings: SocketTimings) -> None:
        self.accepted: _Accepted | None = None
        self._proxy, self._timings = proxy, timings
        self._client = client

    async def run(self) -> None:
        """Send the handshake to sites. Raises ApiError and DownstreamGone."""
        proxy, client = self._proxy, self._client
        with await proxy.admission.admit(client.head, client.address):
            if not client.head.is_for_function:
                raise ApiError(
                    "invalid_request",
                    f"WebSockets are offered at /v1/responses and under {FUNCTIONS}: send plain HTTP here",
                )
            proxied = proxy.proxied(proxy.parser.parse(client.head, b"", client.request_id, client.address))
            await client.while_present(proxy.try_sites(client, proxied, self._answered))

    async def _answered(self, proxied: RequestState, response: UpstreamResponse, preference: Preference) -> None:
        client, metrics, site = self._client, self._proxy.metrics, preference.backend.name
        tries = len(proxied.tries.failures) + 1
        headers = [*response.headers, (REQUEST_ID, client.request_id), (ROUTE, preference.explained(tries))]
        metrics.tried(site, "answered")
        if response.status != SWITCHING_PROTOCOLS:
            metrics.ended(site, "client_error" if response.status < 500 else "server_error")
            return await client.respond(response.status, headers, response.body or b"")
        metrics.ended(site, "ok")
        transport, early = response.switched()
        upstream = WebSocket(
            transport, is_client=True, early=early, max_message_bytes=MAX_MESSAGE_BYTES, timings=self._timings
        )
        self.accepted = _Accepted(site, upstream, headers)


class Tunnel:
    """A client's WebSocket connected to a site's; it is closed if a side reads nothing for `stall_s`."""

    def __init__(self, site: str, upstream: WebSocket, receive: Receive, send: Send, stall_s: float) -> None:
        self.stopping = asyncio.Event()
        self._site = site
        self._upstream = upstream
        self._receive, self._send = receive, send
        self._stall_s = stall_s

    async def run(self) -> str:
        """Forward messages until one side ends, and close the other. Return the reason."""
        from_site = asyncio.create_task(self._from_site())
        from_client = asyncio.create_task(self._from_client())
        stopping = asyncio.create_task(self.stopping.wait())
        tasks: Sequence[asyncio.Task[object]] = (from_site, from_client, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if from_site.done():
                return await self._site_ended(from_site.result())
            if from_client.done():
                return self._client_ended(from_client.result())
            await self._close_client(WebSocketClose(RESTARTING, "the router is restarting"))
            return "the router is shutting down"
        except TimeoutError:
            self._upstream.abort()
            return f"one side did not read for {self._stall_s:g} s"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _from_site(self) -> WebSocketClose:
        """Forward the site's messages. Raises TimeoutError if the client does not read."""
        while not isinstance(message := await self._upstream.receive(), WebSocketClose):
            kind = "text" if isinstance(message, str) else "bytes"
            async with TimeLimit(self._stall_s):
                await self._send({"type": "websocket.send", kind: message})
        return message

    async def _from_client(self) -> WebSocketClose:
        """Forward the client's messages. Raises TimeoutError if the site does not read."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            async with TimeLimit(self._stall_s):
                await self._upstream.send(message["bytes"] if text is None else text)
        return WebSocketClose(message.get("code") or ABNORMAL, message.get("reason") or "")

    async def _site_ended(self, close: WebSocketClose) -> str:
        if close.code == ABNORMAL:  # this code must not be sent
            await self._close_client(WebSocketClose(FAILED, f"the site {self._site} was lost"))
            return "the site was lost"
        await self._close_client(close)
        return f"the site closed it with {close.code}"

    def _client_ended(self, close: WebSocketClose) -> str:
        if close.code == ABNORMAL:
            self._upstream.abort()
            return "the client was lost"
        self._upstream.close(*close)
        return f"the client closed it with {close.code}"

    async def _close_client(self, close: WebSocketClose) -> None:
        async with TimeLimit(self._stall_s):
            await self._send({"type": "websocket.close", "code": close.code, "reason": close.reason})


def _accept(headers: Pairs) -> Message:
    subprotocol = next((value for name, value in headers if name == "sec-websocket-protocol"), None)
    kept = [(name, value) for name, value in headers if not name.startswith("sec-websocket-")]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
    return {"type": "websocket.accept", "subprotocol": subprotocol, "headers": raw}


def _until_disconnect(receive: Receive) -> Receive:
    """Return an ASGI `receive` for a request without a body: it reports only the client's disconnect."""

    async def received() -> Message:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return {"type": "http.disconnect"}

    return received


def _instead_of_a_websocket(send: Send) -> Send:
    """Return a `send` that turns messages of an HTTP response into those of `websocket.http.response`."""

    async def renamed(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return renamed
