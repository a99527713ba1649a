"""WebSockets through the router: a handshake like any request to a function, and behind it two connections joined into one (wire/http/tunnel.py).

A site that refuses before it has switched protocols is passed over or passed on, as its answer says; afterwards nothing is tried again, for nobody
here knows what was said. An open socket is no request at work: it counts as the connection that it is.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import NamedTuple

import orjson

from edge_router.backend import Backend
from edge_router.downstream import head_of
from edge_router.metrics import NO_SITE
from edge_router.proxy import Proxy
from edge_router.request import FUNCTIONS, Head, ValidRequest, request_id_of
from edge_router.upstream import SiteFailed, Upstream, raise_refusal
from wire.errors import ApiError
from wire.headers import HOP_BY_HOP, OURS, REQUEST_ID, ROUTE, SITE
from wire.http.client import SWITCHING_PROTOCOLS, CannotConnect, ConnectionLost, UpstreamConnection
from wire.http.tunnel import Tunnel, Upgrading

MAX_REFUSAL_BYTES = 1 << 20
MIN_SILENCE_S = (
    60.0  # whatever the limit of other streams is: a site pings its clients every 20 s, and nothing else need be said
)

log = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]

RESTARTING = b"\x88\x02\x03\xf4"  # a server's close frame with the code 1012, service restart (registered by IANA)
UPGRADED: Pairs = [("connection", "Upgrade"), ("upgrade", "websocket")]
_DROPPED = HOP_BY_HOP | {"content-length", "date", "server", REQUEST_ID}


class Refusal(NamedTuple):
    """A site's own answer instead of a socket: the client's to read."""

    status: int
    headers: Pairs
    body: bytes


class Tunnels:
    """What the server calls with each client that asks for a WebSocket."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._open: set[Tunnel] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def __call__(self, client: Upgrading) -> None:
        head = head_of(client.scope)
        request_id = request_id_of(head)
        metrics = self._proxy.metrics
        client.cancel_when_gone(asyncio.current_task())
        try:
            site, tunnel = await self._handshake(client, head, request_id)
        except ApiError as error:
            metrics.ended(NO_SITE, error.word)
            return client.answer(*_plain(error, head, request_id))
        except asyncio.CancelledError:
            metrics.ended(NO_SITE, "client_gone" if client.is_gone else "stopped")
            if not client.is_gone:
                raise
            return
        except Exception:
            log.exception("request %s failed inside the router", request_id)
            metrics.ended(NO_SITE, "internal_error")
            return client.answer(*_plain(ApiError("internal_error", "the router failed"), head, request_id))
        if tunnel is not None:
            await self._until_end(tunnel, site, request_id)

    def end(self) -> None:
        """After the requests at work: a socket has no end of its own to wait for. Clients are told to connect again, to another router."""
        for tunnel in tuple(self._open):
            tunnel.leave("the router is shutting down", RESTARTING)

    async def _until_end(self, tunnel: Tunnel, site: str, request_id: str) -> None:
        self._open.add(tunnel)
        try:
            why = await tunnel.ended
            log.info("request %s: the WebSocket at %s ended: %s", request_id, site, why)
        finally:
            tunnel.end("the router stopped")
            self._open.discard(tunnel)

    async def _handshake(self, client: Upgrading, head: Head, request_id: str) -> tuple[str, Tunnel | None]:
        """Counts as a request while it lasts. The client has its answer afterwards."""
        proxy = self._proxy
        address = str(client.scope["client"][0]) if client.scope.get("client") else ""
        proxy.admission.check(head)
        if not head.is_for_function:
            raise ApiError("invalid_request", f"WebSockets are offered under {FUNCTIONS}: send plain HTTP here")
        with proxy.admission.limits.admitted(head, address):
            request = proxy.parser.parse(head, b"", request_id, address)
            failures: dict[str, SiteFailed] = {}
            _, preferences = proxy.selector.rank(request)
            for preference in preferences[: proxy.config.max_tries]:
                backend = proxy.selector.backends[preference.backend.name]
                reasons = preference.explained(len(failures) + 1)
                try:
                    return backend.name, await self._open_at(backend, client, request, reasons)
                except SiteFailed as failure:
                    failures[backend.name] = failure
                    self._note(backend, failure)
            raise proxy.selector.nothing_left(failures)

    async def _open_at(self, backend: Backend, client: Upgrading, request: ValidRequest, reasons: str) -> Tunnel | None:
        """Raises SiteFailed."""
        proxy = self._proxy
        assert proxy.upstream is not None
        with backend.inflight(0) as ticket:
            answer = await self._asked(proxy.upstream, backend, request)
            ticket.answering()
        proxy.metrics.tried(backend.name, "answered")
        further = [(REQUEST_ID, request.request_id), (ROUTE, reasons)]
        if isinstance(answer, Refusal):
            proxy.metrics.ended(backend.name, "client_error" if answer.status < 500 else "server_error")
            client.answer(*_written(answer.status, [*answer.headers, *further], answer.body))
            return None
        proxy.metrics.ended(backend.name, "ok")
        head = _head(101, [*_kept(answer), *further, *UPGRADED])
        proxy.upstream.pool.give_away(answer)
        limit_s = proxy.config.idle_timeout_s
        silence_s = max(limit_s, MIN_SILENCE_S)
        return client.join(
            head, answer.transport, answer.response.switched or b"", silence_s=silence_s, stall_s=limit_s
        )

    async def _asked(self, upstream: Upstream, backend: Backend, request: ValidRequest) -> UpstreamConnection | Refusal:
        """What a site says that is its client's to hear. Raises SiteFailed."""
        link: UpstreamConnection | None = None
        patience_s = self._proxy.config.first_byte_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                link = await upstream.pool.connect(upstream.origin(backend.url))
                upstream.send(link, backend.name, request, may_switch=True)
                await link.head()
                if link.response.status == SWITCHING_PROTOCOLS:
                    switched, link = link, None
                    return switched
                body = await _whole(link)
                raise_refusal(link, body, is_for_function=True)
                return Refusal(link.response.status, _kept(link), body)
        except CannotConnect as error:
            raise SiteFailed("connect", str(error)) from None
        except TimeoutError:
            raise SiteFailed("silent", f"it sent nothing for {patience_s:g} s") from None
        except ConnectionLost as error:
            raise SiteFailed("lost", str(error)) from None
        finally:
            if link is not None:
                upstream.pool.put_back(link)

    def _note(self, backend: Backend, failure: SiteFailed) -> None:
        self._proxy.metrics.tried(backend.name, failure.kind)
        if failure.kind == "connect":
            backend.failed(failure.detail)
        elif failure.kind == "draining":
            backend.refused_draining()


def _kept(link: UpstreamConnection) -> Pairs:
    return [
        (name, value)
        for name, value in link.response.headers
        if name not in _DROPPED and (name == SITE or not name.startswith(OURS))
    ]


async def _whole(link: UpstreamConnection) -> bytes:
    body = b""
    while part := await link.read():
        body += part
        if len(body) > MAX_REFUSAL_BYTES:
            raise SiteFailed("malformed", f"its refusal is larger than {MAX_REFUSAL_BYTES >> 20} MiB")
    return body


def _plain(error: ApiError, head: Head, request_id: str) -> tuple[bytes, bytes]:
    headers = [*error.headers(), ("content-type", "application/json"), (REQUEST_ID, request_id)]
    return _written(error.status(head.dialect), headers, orjson.dumps(error.body(head.dialect)))


def _written(status: int, headers: Pairs, body: bytes) -> tuple[bytes, bytes]:
    return _head(status, [*headers, ("content-length", str(len(body))), ("connection", "close")]), body


def _head(status: int, headers: Pairs) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
