"""The router as an ASGI application: what it is made of, and how long each part lives."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from edge_router.client_places import ClientPlaces
from edge_router.deployments import deployment_routes
from edge_router.discovery import router_place, static_backends
from edge_router.downstream import head_of
from edge_router.durable import PATH, Recordings, StreamRoutes
from edge_router.health import HealthMonitor, connection_trace, status_fetch
from edge_router.hints import WakeHints
from edge_router.limits import Limits
from edge_router.metrics import RouterMetrics
from edge_router.peek import hop_secret
from edge_router.policy import Policy
from edge_router.policy.cost import CostPolicy
from edge_router.proxy import PREFIXES, Proxy
from edge_router.routes import ADMIN_PATHS, OwnRoutes, method_not_allowed, not_found, refusal
from edge_router.session import SessionTable
from edge_router.site_clocks import SiteClocks
from edge_router.tunnels import Tunnels
from edge_router.upstream import Upstream, client_session, connector
from sites.network import NetworkConfig
from wire.credentials import Access, Key
from wire.errors import ApiError
from wire.http.exchange import Exchange


def build_app(
    network: NetworkConfig, *, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
) -> "Router":
    """`app.state.proxy.drain(timeout_s)` before stopping the server."""
    relay = network.relay
    backends = static_backends(network, clock)
    metrics = RouterMetrics(backends.values())
    sessions = SessionTable(relay.session_entries, relay.session_ttl_s, clock)
    urls = {backend.name: backend.url for backend in backends.values()}
    secret = hop_secret()
    access = access_of(network)
    limits = Limits(network.door, network.tenant_limits, network.tenants, secret, clock)
    places = ClientPlaces.of(network.clients)
    recordings = Recordings(network.durable, clock)
    proxy = Proxy(
        relay, backends, policy or CostPolicy(), sessions, metrics, limits, recordings, clock,
        access=access, places=places, secret=secret, body_timeout_s=network.door.body_timeout_s,
    )  # fmt: skip
    clocks = SiteClocks([*backends])
    own = OwnRoutes(router_place(network), backends, proxy)

    metrics.watch("tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.watch("sessions", "Entries in the table of sessions.", lambda: len(sessions))
    metrics.watch("durable_streams", "Streams that can be read again.", lambda: len(recordings))
    metrics.watch("durable_bytes", "What they hold in memory.", lambda: recordings.num_bytes)
    metrics.watch(
        "site_connections", "Connections to sites.", lambda: proxy.upstream.pool.num_open if proxy.upstream else 0
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            connector() as tcp,
            client_session(tcp, relay, connection_trace()) as probing,
            WakeHints(probing, urls, proxy.secret, clocks, metrics.registry) as hints,
            Upstream(relay, proxy.secret, clocks) as upstream,
        ):
            monitor = HealthMonitor(backends.values(), status_fetch(probing, secret, clocks), network.health, clock)
            tasks = [asyncio.create_task(monitor.run())]
            if places.database is not None:
                tasks.append(asyncio.create_task(places.database.watch()))
            proxy.upstream, proxy.hints = upstream, hints
            try:
                yield
            finally:
                await recordings.close()
                proxy.upstream = proxy.hints = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    app = Router(
        routes=[*own.routes(), *deployment_routes(backends)],
        lifespan=lifespan,
        exception_handlers={404: not_found, 405: method_not_allowed},
    )
    app.router.redirect_slashes = False  # /v1 is not /v1/: a redirect would turn a client's POST into a GET
    app.state.proxy = app.proxy = proxy
    app.tunnels = Tunnels(proxy, clocks)
    metrics.watch("sockets", "Open WebSockets.", lambda: len(app.tunnels))
    app.streams = StreamRoutes(recordings, limits, access, secret)
    app.access = access
    return app


def access_of(network: NetworkConfig) -> Access:
    keys = [Key(tenant.name, tenant.key_sha256, tenant.admin) for tenant in network.tenants]
    return Access(keys, is_required=network.door.require_key)


class Router(Starlette):
    """What is forwarded goes straight to the proxy: it answers for its own errors, and the way through middleware and routes costs a tenth of a
    request."""

    access: Access
    proxy: Proxy
    tunnels: Tunnels
    streams: StreamRoutes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        if scope["type"] == "http" and scope["path"].startswith(PREFIXES):
            return self.proxy(scope, receive, send)
        if scope["type"] == "http" and scope["path"].startswith(PATH):
            return self.streams(scope, receive, send)
        if scope["type"] == "http" and scope["path"] in ADMIN_PATHS and self.access.is_required:
            return self._for_admins(scope, receive, send)
        return super().__call__(scope, receive, send)

    async def _for_admins(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.access.check_admin(head_of(scope).header("authorization"))
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def direct(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """The same, from our own server."""
        return self.proxy.direct(exchange) if exchange.path.startswith(PREFIXES) else None
