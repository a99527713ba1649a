"""The router as an ASGI application: what it is made of, and how long each part lives."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from dialects.responses_app import RESPONSES, ResponsesApp
from edge_router.activity import Operations, RouterActivity
from edge_router.admission import AdmissionFilter, TenantLimits
from edge_router.batches.queue import BatchQueue
from edge_router.batches.routes import BatchRoutes, is_for_batches
from edge_router.client_places import ClientPlaces
from edge_router.data_places import DataPlaces
from edge_router.deployments import deployment_api
from edge_router.discovery import router_place, static_backends
from edge_router.durable import PATH, DurableStreams, StreamRoutes
from edge_router.health import HealthMonitor, client_session, connection_trace, connector, status_fetch
from edge_router.hints import WakeHints
from edge_router.ledger.accounting import Accounting
from edge_router.ledger.ledger import Ledger
from edge_router.ledger.prices import PriceList
from edge_router.ledger.site_usage import SiteUsage
from edge_router.metrics import RouterMetrics
from edge_router.objectives import Objectives
from edge_router.policy import Policy
from edge_router.policy.cost import CostPolicy
from edge_router.proxy import Proxy
from edge_router.quotas.daily import DailyQuotas
from edge_router.quotas.shared import SharedQuotas, shared_quotas
from edge_router.request import FUNCTIONS, RequestParser, hop_secret
from edge_router.routed_finetunes import RoutedFinetunes, is_about_finetunes
from edge_router.routes import FAILURES, OwnRoutes, own_version
from edge_router.selection import SiteSelector
from edge_router.session import SessionTable
from edge_router.site_clocks import SiteClocks
from edge_router.site_orders import SiteOrders
from edge_router.tracing import Tracing
from edge_router.tunnels import Tunnels
from edge_router.upstream import Upstream
from edge_router.usage import UsageRoutes
from page.feed import Feed
from page.routes import PageRoutes
from page.sessions import Sessions
from sites.config import ConfigError
from sites.network import NetworkConfig
from wire.credentials import Access, known_keys
from wire.headers import HOP_SECRET_ENV

FORWARDED = ("/ai/v1/", "/v1/", "/client/v4/", FUNCTIONS)


class RouterApp(Starlette):
    """`proxy.drain(timeout_s)` and `tunnels.end()` before stopping the server."""

    proxy: Proxy
    tunnels: Tunnels
    streams: StreamRoutes
    responses: ResponsesApp
    batches: BatchRoutes
    finetunes: RoutedFinetunes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the router does not answer itself passes by Starlette's error handling: each token would go through two more `send`s."""
        app: ASGIApp = super().__call__
        if scope["type"] == "websocket":
            app = self.tunnels
        elif scope["type"] == "http" and RESPONSES in scope["path"] and scope["path"].startswith(FORWARDED[:3]):
            app = self.responses
        elif scope["type"] == "http" and _is_for_batches(scope["path"], scope.get("query_string", b"")):
            app = self.batches
        elif scope["type"] == "http" and "/ai/finetunes" in scope["path"] and is_about_finetunes(scope["path"]):
            app = self.finetunes
        elif scope["type"] == "http" and scope["path"].startswith(FORWARDED):
            app = self.proxy
        elif scope["type"] == "http" and scope["path"].startswith(PATH):
            app = self.streams
        await app(scope, receive, send)


def _is_for_batches(path: str, query: bytes) -> bool:
    may_be = b"queueRequest" in query or "/v1/files" in path or "/v1/batches" in path  # which few are
    return may_be and is_for_batches(path, query)


def build_app(
    network: NetworkConfig, *, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
) -> RouterApp:
    relay, secret = network.relay, hop_secret()
    backends = static_backends(network, clock)
    metrics = RouterMetrics(backends.values())
    sessions = SessionTable(relay.session_entries, relay.session_ttl_s, clock)
    limits = TenantLimits(network.door, network.tenant_limits, network.accounts, secret, clock)
    shared = limits.shared = shared_quotas(network.quotas, clock)
    admission = AdmissionFilter(access_of(network), limits)
    places = ClientPlaces.of(network.clients)
    recordings = recordings_of(network, secret, clock)
    accounting = accounting_of(network, secret, recordings, shared)
    proxy = Proxy(
        relay,
        admission,
        RequestParser(secret, relay.max_hops, places.place),
        SiteSelector(relay, backends, policy or CostPolicy(), sessions, metrics, clock, DataPlaces(network)),
        recordings,
        accounting,
        metrics,
        clock,
        body_timeout_s=network.door.body_timeout_s,
    )
    if network.telemetry.otlp is not None:
        proxy.tracing = Tracing(network.telemetry.otlp, network.place.city, own_version())
    batches = batches_of(network, proxy)
    if (objectives := objectives_of(network)) is not None:
        metrics.judge(objectives)
    clocks = SiteClocks([*backends])
    tunnels = Tunnels(proxy)
    place, pages = router_place(network), Sessions(admission.access, secret or "")
    own = OwnRoutes(place, proxy, places, pages)
    feed = Feed(RouterActivity(place, own_version(), proxy, clock))
    page, deployments = PageRoutes(feed, pages), deployment_api(backends, admission.access, clocks)
    page.functions = deployments
    page.has_usage = accounting.ledger is not None
    usage = UsageRoutes(accounting, admission.access, pages)
    _watch(metrics, proxy, sessions, recordings, tunnels)

    @asynccontextmanager
    async def lifespan(app: RouterApp) -> AsyncIterator[None]:
        urls = {backend.name: backend.url for backend in backends.values()}
        async with (
            connector() as tcp,
            client_session(tcp, relay, connection_trace()) as probing,
            WakeHints(orders := SiteOrders(probing, urls, secret, clocks), metrics.registry) as hints,
            Upstream(relay, secret, clocks) as upstream,
        ):
            monitor = HealthMonitor(backends.values(), status_fetch(probing, secret, clocks), network.health, clock)
            tasks = [asyncio.create_task(monitor.run()), asyncio.create_task(feed.run())]
            if recordings.journals is not None:
                tasks.append(asyncio.create_task(recordings.sweep()))
            if places.database is not None:
                tasks.append(asyncio.create_task(places.database.watch()))
            if accounting.ledger is not None:
                tasks.append(asyncio.create_task(accounting.ledger.run()))
            if shared is not None:
                tasks.append(asyncio.create_task(shared.run()))
            if objectives is not None:
                tasks.append(asyncio.create_task(objectives.run()))
            if batches is not None:
                batches.start()
            if secret:
                proxy.selector.finetunes.orders = orders
                if accounting.ledger is not None:
                    tasks.append(asyncio.create_task(SiteUsage(backends, orders, accounting).run()))
                tasks.append(asyncio.create_task(proxy.selector.finetunes.run()))
            proxy.upstream, proxy.selector.hints = upstream, hints
            operations = Operations(backends, orders)
            page.actions, page.timeline = operations.by_name(), operations.timeline
            try:
                yield
            finally:
                await recordings.close()
                await app.responses.close()
                if batches is not None:
                    await batches.close()
                proxy.upstream = proxy.selector.hints = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if accounting.ledger is not None:
                    await accounting.ledger.close()
                if shared is not None:
                    await shared.close()
                if objectives is not None:
                    await objectives.close()
                if proxy.tracing is not None:
                    await asyncio.to_thread(proxy.tracing.close)

    app = RouterApp(
        routes=[*own.routes(), *page.routes(), *usage.routes(), *deployments.routes()],
        lifespan=lifespan,
        exception_handlers=FAILURES,
    )
    app.router.redirect_slashes = False  # /v1 is not /v1/: a redirect would turn a client's POST into a GET
    app.proxy, app.tunnels = proxy, tunnels
    app.streams = StreamRoutes(recordings, admission, secret, proxy.handle)
    app.batches = BatchRoutes(proxy, batches)
    app.finetunes = RoutedFinetunes(proxy, proxy.selector.finetunes)
    app.responses = ResponsesApp(proxy, admission.access, int(relay.max_body_mib * 2**20))
    return app


def recordings_of(network: NetworkConfig, secret: str, clock: Callable[[], float]) -> DurableStreams:
    """Raises ConfigError for a folder of journals that cannot be used, or whose streams no site would go on with."""
    folder = network.durable.directory
    if folder is not None and not secret:
        raise ConfigError(
            f"another router can go on with a durable stream only at sites that know it: set {HOP_SECRET_ENV}, here and there"
        )
    try:
        return DurableStreams(network.durable, clock)
    except OSError as error:
        raise ConfigError(f"durable.directory {folder} cannot be used: {error}") from None


def accounting_of(
    network: NetworkConfig, secret: str, recordings: DurableStreams, shared: SharedQuotas | None
) -> Accounting:
    """Raises ConfigError for a ledger that cannot be written, or whom nobody tells what was used."""
    config, prices = network.ledger, PriceList(network.prices, network.ledger.currency)
    quotas = DailyQuotas(time.time, shared)
    quotas.set(network.accounts)
    if config.directory is None:
        return Accounting(prices, None, quotas)
    if not secret:
        raise ConfigError(
            f"the ledger knows what was used from sites that know this router: set {HOP_SECRET_ENV}, here and there"
        )
    ledger = Ledger(config, Path(config.directory).expanduser(), prices, kept=recordings.as_kept)
    return Accounting(prices, ledger, quotas)


def batches_of(network: NetworkConfig, proxy: Proxy) -> BatchQueue | None:
    """Return the queue beside the ledger, if that has a place. Raises ConfigError for one that cannot be opened."""
    if network.ledger.directory is None:
        return None
    path = Path(network.ledger.directory).expanduser() / "batches.sqlite"
    try:
        return BatchQueue(path, proxy, proxy.admission.access)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"the queue of batches {path} cannot be opened: {error}") from None


def objectives_of(network: NetworkConfig) -> Objectives | None:
    """Return the counts beside the ledger, or in memory where it has no place. Raises ConfigError for a file that cannot be opened."""
    if not network.objectives:
        return None
    folder = network.ledger.directory
    path = None if folder is None else Path(folder).expanduser() / "objectives.sqlite"
    try:
        return Objectives(network.objectives, path)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"the counts of objectives {path} cannot be opened: {error}") from None


def access_of(network: NetworkConfig) -> Access:
    return Access(known_keys(network.accounts, network.keys), is_required=network.door.require_key)


def _watch(
    metrics: RouterMetrics, proxy: Proxy, sessions: SessionTable, recordings: DurableStreams, tunnels: Tunnels
) -> None:
    metrics.watch("tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.watch("sessions", "Entries in the table of sessions.", lambda: len(sessions))
    metrics.watch("sockets", "Open WebSockets.", lambda: len(tunnels))
    metrics.watch("durable_streams", "Streams that can be read again.", lambda: len(recordings))
    metrics.watch("durable_bytes", "What they hold in memory.", lambda: recordings.num_bytes)
    if (ledger := proxy.accounting.ledger) is not None:
        metrics.watch("ledger_unwritten", "Usage records not written yet.", lambda: ledger.num_unwritten)
        metrics.watch("ledger_failing", "1 while usage cannot be written.", lambda: float(ledger.fault is not None))
    if (shared := proxy.admission.limits.shared) is not None:
        metrics.watch("quota_leases", "Parts of accounts' limits that are lent to this router.", lambda: len(shared))
        metrics.watch("quotas_failing", "1 while their store cannot be asked.", lambda: float(shared.fault is not None))
    metrics.watch(
        "site_connections", "Connections to sites.", lambda: proxy.upstream.pool.num_open if proxy.upstream else 0
    )
