"""The parts of a router and their lifetimes. Routes are in app.py."""

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from pilotlight.edge_router.admission.filter import AdmissionFilter, TenantLimits
from pilotlight.edge_router.admission.quotas.daily import DailyQuotas
from pilotlight.edge_router.admission.quotas.shared import SharedQuotas, shared_quotas
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.backends.health import HealthMonitor, status_fetch
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.edge_router.backends.site_sessions import client_session, connection_trace, connector
from pilotlight.edge_router.backends.wake_hints import WakeHints
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.forwarding.stages import Stages
from pilotlight.edge_router.forwarding.timeouts import AnswerLimits
from pilotlight.edge_router.forwarding.upstream import SiteConnections
from pilotlight.edge_router.forwarding.websockets import WebSocketRelay
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger import Ledger
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.metering.ledger.site_usage import SiteUsage
from pilotlight.edge_router.metering.objectives import Objectives
from pilotlight.edge_router.requests.client_places import ClientPlaces
from pilotlight.edge_router.requests.function_hosts import FunctionHosts
from pilotlight.edge_router.requests.request import RequestParser, hop_secret
from pilotlight.edge_router.requests.session import SessionTable
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.routing.selection import SiteSelector
from pilotlight.edge_router.routing.views import Policy
from pilotlight.edge_router.services.batches.batch_store import BatchLimits
from pilotlight.edge_router.services.batches.queue import BatchQueue
from pilotlight.edge_router.services.drained_sites import DrainedSites
from pilotlight.edge_router.services.finetune_registry import FinetuneTimings, SiteFinetunes
from pilotlight.edge_router.services.issued_keys import with_issued_keys
from pilotlight.edge_router.telemetry.metrics import RouterMetrics
from pilotlight.edge_router.telemetry.recent_requests import RecentRequests
from pilotlight.edge_router.telemetry.tracing import Tracing
from pilotlight.edge_router.workers.role import WorkerRole, abandoned_ledgers, check_workers
from pilotlight.sites.config import ConfigError, drained_sites_file, router_state_directory
from pilotlight.sites.network import LedgerConfig, NetworkConfig
from pilotlight.support import background
from pilotlight.support.database import DatabaseError
from pilotlight.support.version import own_version
from pilotlight.wire.credentials import Access, known_keys
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.http.certificate import client_context
from pilotlight.wire.http.websocket import SocketTimings

# Settings of an account that limit its requests for models.
LIMITS = ("models", "requests_per_min", "tokens_per_min", "max_open", "tokens_per_day", "cost_per_day")


class RouterLimits(NamedTuple):
    """Limits and intervals that a network's file does not set."""

    answers: AnswerLimits = AnswerLimits()
    batches: BatchLimits = BatchLimits()
    finetunes: FinetuneTimings = FinetuneTimings()
    sockets: SocketTimings = SocketTimings()
    forget_every_s: float = 5.0  # interval of checks for sites that have left


class EdgeRouter:
    """A router that forwards requests inside `running()`.
    Call `proxy.drain(timeout_s)` and `tunnels.end()` before you leave it."""

    def __init__(
        self,
        network: NetworkConfig,
        policy: Policy,
        clock: Callable[[], float],
        role: WorkerRole | None = None,
        limits: RouterLimits | None = None,
    ) -> None:
        """`role` is this process's role if the router has several workers.

        Raises ConfigError for a file or folder of the configuration that cannot be used.
        """
        kept = network.ledger
        network = network if role is None else role.configured(network)
        self.configured, self.keys_file = network, router_state_directory() / "keys.toml"
        self.drained = DrainedSites(drained_sites_file())
        self.network = self.merged = network = with_issued_keys(network, self.keys_file)
        self.clock, self.role = clock, role
        self.check(network)
        limits = limits or RouterLimits()
        self._forget_every_s = limits.forget_every_s
        relay = network.relay
        self.secret = hop_secret()
        self.tls = client_context(network.hop.authority)
        self.discovery = Discovery(network, clock)
        self.discovery.cordon(self.drained.names())
        self.backends = self.discovery.backends
        self.metrics = RouterMetrics(self.backends.values())
        self.shared = shared_quotas(network.quotas, clock)
        tenants = TenantLimits(network.door, network.tenant_limits, network.accounts, self.secret, clock, self.shared)
        self.admission = AdmissionFilter(access_of(network), tenants, self.secret)
        self.sessions = SessionTable(relay.session_entries, relay.session_ttl_s, clock)
        self.places = ClientPlaces.of(network.clients)
        self.hosts = _function_hosts(network, self.secret)
        self.accounting = _accounting(network, kept, self.secret, self.shared, role)
        self.clocks = SiteClocks([*self.backends])
        self.orders = SiteControl(self.discovery.urls, self.secret, self.clocks)
        self._monitor: HealthMonitor | None = None  # None unless the router runs
        self._hints = WakeHints(self.orders, self.metrics.registry)
        data = DataPlaces(network)
        finetunes = SiteFinetunes(self.backends, data, self.orders, limits.finetunes)
        selector = SiteSelector(self.backends, policy, self.sessions, self.metrics, clock, data, finetunes, self._hints)
        self._tracing, self.objectives = _tracing(network), _objectives(network)
        self.recent = RecentRequests()
        self.stages = Stages(tenants, self.accounting, selector, self.objectives, self._tracing)
        self.proxy = Proxy(
            relay,
            self.admission,
            RequestParser(self.secret, relay.max_hops, self.places.place),
            selector,
            self.metrics,
            SiteConnections(relay, self.secret, self.clocks, self.tls, limits.answers),
            clock,
            body_timeout_s=network.door.body_timeout_s,
            stages=self.stages.present(),
            recent=self.recent,
        )
        # A router with several workers has no batches: several of them, or an old one and its successor, would run the same batch.
        self.batches = _batches(network, self.proxy, limits.batches) if role is None else None
        if self.objectives is not None:
            self.metrics.registry.register(self.objectives)
        self.tunnels = WebSocketRelay(self.proxy, limits.sockets)
        self._watch()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe sites and run background work."""
        async with AsyncExitStack() as stack:
            if self._tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            stores = (
                ("objectives", self.objectives),
                ("shared quotas", self.shared),
                ("the ledger", self.accounting.ledger),
            )
            for name, store in stores:  # stores record requests until the last one has ended
                if store is not None:
                    await stack.enter_async_context(_at_work(store, name))
            await stack.enter_async_context(self.proxy.upstream)
            tcp = await stack.enter_async_context(connector(self.tls))
            probing = await stack.enter_async_context(client_session(tcp, self.network.relay, connection_trace()))
            stack.enter_context(self.orders.by(probing))
            await stack.enter_async_context(self._hints)
            fetch = status_fetch(probing, self.secret, self.clocks)
            monitor = self._monitor = HealthMonitor(self.backends.values(), fetch, self.network.health, self.clock)
            works = ("the probes of sites", monitor.run), ("forgetting sites that have left", self._forget_sites)
            for name, work in (*works, *self._works()):
                await stack.enter_async_context(background.running(work, name))
            if self.batches is not None:
                await stack.enter_async_context(_at_work(self.batches, "the queue of batches"))
            yield

    def reload(self, found: NetworkConfig) -> None:
        """Apply settings that can change while the router runs: sites, keys, limits, prices and data rules.

        Raises ConfigError.
        """
        merged = with_issued_keys(found, self.keys_file)
        self.check(merged)
        self.configured = found
        self.admission.access.update_from(access_of(merged))
        self.admission.limits.set(merged.door, merged.tenant_limits, merged.accounts)
        self.merged = merged
        self.hosts.reload(merged)
        self.accounting.prices.update_from(PriceList(merged.prices, self.network.ledger.currency))
        self.accounting.quotas.set(merged.accounts)
        self.set_sites(merged)

    def check(self, network: NetworkConfig) -> None:
        """Raise ConfigError if this router's workers together cannot keep to the configuration."""
        if self.role is not None:
            check_workers(network, self.role.count)

    def is_limited(self, account: str) -> bool:
        """Tell whether an account has limits, or may not use all models.

        Without the network's secret no site can name the account to this router, so there are none."""
        if not account or not self.secret:
            return False
        own = [each for each in self.merged.accounts if each.name == account]
        return any(
            getattr(each, name, None) is not None for each in (*own, self.merged.tenant_limits) for name in LIMITS
        )

    def apply(self, found: NetworkConfig) -> None:
        """Apply settings, and keys that were created or revoked, in all workers. Raises ConfigError."""
        self.reload(found)
        self.tell_workers()

    async def set_drained(self, site: str, is_drained: bool) -> None:
        """Start or end the drain of a site, in all workers. Raises ApiError."""
        await self.drained.change(site, is_drained=is_drained)
        self.reload_all()

    def reload_all(self) -> None:
        """Read the files of the state directory again, in all workers. Raises ConfigError."""
        self.apply(self.configured)

    def tell_workers(self) -> None:
        """Make the other workers, if any, read changed files again."""
        if self.role is not None:
            os.kill(os.getppid(), signal.SIGHUP)

    def set_sites(self, network: NetworkConfig) -> None:
        """Apply the sites of the file, and the data rules."""
        self.discovery.reload(network)
        self.discovery.cordon(self.drained.names())
        self.proxy.selector.places.update_from(DataPlaces(network))
        self.proxy.set_stages(self.stages.present())
        if self._monitor is not None:
            self._monitor.changed()

    async def _forget_sites(self) -> None:
        while True:
            await asyncio.sleep(self._forget_every_s)
            self.discovery.sweep()
            if self._monitor is not None:
                self._monitor.changed()

    def _works(self) -> Iterator[tuple[str, background.Work]]:
        if self.places.database is not None:
            yield "the watch over clients.geo_database", self.places.database.watch
        if self.secret:  # sites answer only signed requests
            yield "carrying fine-tunes between sites", self.proxy.selector.finetunes.run
            if self.accounting.ledger is not None:
                yield "collecting what functions have used", SiteUsage(self.backends, self.orders, self.accounting).run

    def _watch(self) -> None:
        watch, proxy = self.metrics.watch, self.proxy
        watch("tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
        watch("sessions", "Entries in the session table.", lambda: len(self.sessions))
        watch("sockets", "Open WebSockets of functions.", lambda: len(self.tunnels))
        if (ledger := self.accounting.ledger) is not None:
            watch("ledger_unwritten", "Usage records not written yet.", lambda: ledger.num_unwritten)
            watch("ledger_failing", "1 while usage cannot be written.", lambda: float(ledger.fault is not None))
        if (shared := self.shared) is not None:
            watch("quota_leases", "Parts of shared limits that are leased to this router.", lambda: len(shared))
            watch(
                "quotas_failing",
                "1 while the store of shared limits cannot be reached.",
                lambda: float(shared.fault is not None),
            )
        watch("site_connections", "Connections to sites.", lambda: proxy.upstream.pool.num_open)


class _Store(Protocol):
    """A store that writes its records in the background, after the requests."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def _at_work(store: _Store, name: str) -> AsyncIterator[None]:
    try:
        async with background.running(store.run, name):
            yield
    finally:
        await store.close()


def _function_hosts(network: NetworkConfig, secret: str) -> FunctionHosts:
    """Return the host names of functions. Raises ConfigError if there are any but no network secret."""
    hosts = FunctionHosts(network)
    if hosts and not secret:
        raise ConfigError(
            f"hosts and functions.domain need {HOP_SECRET_ENV}, here and at the sites: without it sites ignore the host of a function"
        )
    return hosts


def access_of(network: NetworkConfig) -> Access:
    return Access(known_keys(network.accounts, network.keys), is_required=network.door.require_key)


def _accounting(
    network: NetworkConfig,
    kept: LedgerConfig,
    secret: str,
    shared: SharedQuotas | None,
    role: WorkerRole | None,
) -> Accounting:
    """Return the accounting.
    `kept` is the ledger of the whole router, and that of `network` is this process's.
    Raises ConfigError if the ledger cannot be written, or no site would report usage."""
    config, prices = network.ledger, PriceList(network.prices, network.ledger.currency)
    quotas = DailyQuotas(time.time, shared)
    quotas.set(network.accounts)
    if config.directory is None or kept.directory is None:
        return Accounting(prices, None, quotas)
    if not secret:
        raise ConfigError(
            f"the ledger needs a network secret, with which sites report usage: set {HOP_SECRET_ENV}, at routers and sites"
        )
    own = Path(config.directory).expanduser()
    abandoned = abandoned_ledgers(Path(kept.directory).expanduser(), own, role)
    return Accounting(prices, Ledger(config, own, prices, abandoned=abandoned), quotas)


def _tracing(network: NetworkConfig) -> Tracing | None:
    otlp = network.telemetry.otlp
    return None if otlp is None else Tracing(otlp, network.place.city, own_version())


def _batches(network: NetworkConfig, proxy: Proxy, limits: BatchLimits) -> BatchQueue | None:
    """Return the queue of batches, stored in the ledger's directory; None without one.
    Raises ConfigError if it cannot be opened."""
    if network.ledger.directory is None:
        return None
    path = Path(network.ledger.directory).expanduser() / "batches.sqlite"
    try:
        return BatchQueue(path, proxy, proxy.admission.access, limits)
    except (sqlite3.Error, OSError, DatabaseError) as error:
        raise ConfigError(f"the queue of batches {path} cannot be opened: {error}") from None


def _objectives(network: NetworkConfig) -> Objectives | None:
    """Return the objectives; None if the file has none. Counts are in the ledger's directory or in memory.
    Raises ConfigError if the file cannot be opened."""
    if not network.objectives:
        return None
    folder = network.ledger.directory
    path = None if folder is None else Path(folder).expanduser() / "objectives.sqlite"
    try:
        return Objectives(network.objectives, path)
    except (sqlite3.Error, OSError, DatabaseError) as error:
        raise ConfigError(f"the counts of objectives {path} cannot be opened: {error}") from None
