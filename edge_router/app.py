"""The router as an ASGI application: what it is made of, and how long each part lives."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Route

from edge_router.deployments import deployment_routes
from edge_router.discovery import router_place, static_backends
from edge_router.health import HealthMonitor, connection_trace, status_fetch
from edge_router.hints import WakeHints
from edge_router.metrics import RouterMetrics
from edge_router.policy import Policy
from edge_router.policy.cost import CostPolicy
from edge_router.proxy import PREFIXES, Proxy
from edge_router.routes import OwnRoutes, method_not_allowed, not_found
from edge_router.session import SessionTable
from edge_router.upstream import Upstream, client_session, connector
from sites.config import NetworkConfig


def build_app(
    network: NetworkConfig, *, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
) -> Starlette:
    """`app.state.proxy.drain(timeout_s)` before stopping the server."""
    relay = network.relay
    backends = static_backends(network, clock)
    metrics = RouterMetrics(backends.values())
    sessions = SessionTable(relay.session_entries, relay.session_ttl_s, clock)
    proxy = Proxy(relay, backends, policy or CostPolicy(), sessions, metrics, clock)
    urls = {backend.name: backend.url for backend in backends.values()}
    own = OwnRoutes(router_place(network), backends, proxy)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            connector() as tcp,
            client_session(tcp, relay) as session,
            client_session(tcp, relay, connection_trace()) as probing,
            WakeHints(probing, urls, proxy.secret, metrics.registry) as hints,
        ):
            monitor = HealthMonitor(backends.values(), status_fetch(probing), network.health, clock)
            probes = asyncio.create_task(monitor.run())
            proxy.upstream, proxy.hints = Upstream(session, relay, proxy.secret), hints
            try:
                yield
            finally:
                proxy.upstream = proxy.hints = None
                probes.cancel()
                await asyncio.gather(probes, return_exceptions=True)

    app = Starlette(
        routes=[
            *own.routes(),
            *deployment_routes(backends),
            *(Route(prefix + "{rest:path}", proxy) for prefix in PREFIXES),
        ],
        lifespan=lifespan,
        exception_handlers={404: not_found, 405: method_not_allowed},
    )
    app.router.redirect_slashes = False  # /v1 is not /v1/: a redirect would turn a client's POST into a GET
    app.state.proxy = proxy
    return app
