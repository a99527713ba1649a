"""The router as an ASGI application, which sends each request to its handler."""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.assembly import EdgeRouter, RouterLimits
from pilotlight.edge_router.backends.discovery import router_place
from pilotlight.edge_router.forwarding.downstream import head_of
from pilotlight.edge_router.metering.ledger.ledger_store import configured
from pilotlight.edge_router.metering.usage_report import UsageRoutes
from pilotlight.edge_router.response_door import ResponseDoor
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import Policy
from pilotlight.edge_router.service_table import RouterService, is_for_responses, service_of
from pilotlight.edge_router.services.batches.routes import BatchRoutes
from pilotlight.edge_router.services.deployments import DeployGuard, DeploymentApi
from pilotlight.edge_router.services.finetune_routes import RoutedFinetunes
from pilotlight.edge_router.services.issued_keys import IssuedKeys
from pilotlight.edge_router.services.joining import JoinRoutes
from pilotlight.edge_router.services.model_lists import ModelLists
from pilotlight.edge_router.services.site_operations import SiteOperations
from pilotlight.edge_router.telemetry.activity import RouterActivity
from pilotlight.edge_router.telemetry.status_routes import FAILURES, OWN_PATHS, OwnRoutes
from pilotlight.edge_router.workers.role import WorkerRole
from pilotlight.edge_router.workers.siblings import FirstWorker, Siblings
from pilotlight.page.feed import Feed
from pilotlight.page.management import ManagementRoutes
from pilotlight.page.routes import PageRoutes
from pilotlight.page.sessions import Sessions
from pilotlight.response_store.app import ResponsesApp
from pilotlight.response_store.response_database import ResponseDatabase, RetentionPolicy
from pilotlight.response_store.sockets import ResponseSockets
from pilotlight.sites.config import router_state_directory
from pilotlight.sites.network import NetworkConfig
from pilotlight.support import background
from pilotlight.support.version import own_version
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.paths import normalize_path


def build_app(
    network: NetworkConfig,
    *,
    policy: Policy | None = None,
    clock: Callable[[], float] = time.monotonic,
    file: Path | None = None,
    role: WorkerRole | None = None,
    limits: RouterLimits | None = None,
) -> "RouterApp":
    """Assemble a router.

    `file` is the network's file, to which joining machines are added; `role` is the process's role among a router's workers. Raises ConfigError.
    """
    return RouterApp(EdgeRouter(network, policy or CostPolicy(), clock, role, limits), file)


class RouterApp(Starlette):
    def __init__(self, router: EdgeRouter, file: Path | None = None) -> None:
        proxy, access, role = router.proxy, router.admission.access, router.role
        self.edge = router
        self.siblings = None if role is None else Siblings(role, router.metrics.render)
        self.batches = BatchRoutes(proxy, router.batches)
        self.model_lists = ModelLists(proxy, router.accounting.prices)
        self.finetunes = RoutedFinetunes(proxy, proxy.selector.finetunes)
        most, keeping = int(router.network.relay.max_body_mib * 2**20), _keeping(router.network)
        self.responses = ResponsesApp(proxy.admitted, ResponseDoor(proxy), most, keeping)
        router.metrics.watch(
            "responses_failing",
            "1 if the last attempt to read or write stored responses failed.",
            lambda: float(self.responses.is_failing),
        )
        self._services: dict[RouterService | None, Application] = {
            RouterService.SITES: proxy,
            RouterService.RESPONSES: self.responses,
            RouterService.BATCHES: self.batches,
            RouterService.FINETUNES: self.finetunes,
            RouterService.MODEL_LISTS: self.model_lists,
        }
        self.response_sockets = ResponseSockets(self._respond, lambda scope: proxy.admission.identify(head_of(scope)))
        place, sessions = router_place(router.network), Sessions(access, router.secret)
        self.feed = Feed(RouterActivity(place, own_version(), proxy, router.clock))
        places, hosts = proxy.selector.places, router.hosts
        guard = DeployGuard(os.environ.get(DEPLOY_TOKEN_ENV, ""), router.secret, access, router.clocks)
        self.deployments = DeploymentApi(
            router.backends,
            guard,
            places,
            hosts,
            router_state_directory(),
            router.tls,
            router.tell_workers,
            router.is_limited,
        )
        has_usage = router.accounting.ledger is not None
        operations = SiteOperations(router.backends, router.orders, router.set_drained)
        joining = JoinRoutes(router.network, router.secret, file, router.backends, router.apply)
        self.page = PageRoutes(
            self.feed,
            sessions,
            functions=self.deployments,
            timeline=operations.timeline,
            requests=lambda: router.recent.described(router.orders),
            has_usage=has_usage,
            has_keys=True,
            has_joining=joining.is_open,
        )
        keys = IssuedKeys(router.keys_file, lambda: router.configured, router.check, router.reload_all)
        self.management = ManagementRoutes(operations, sessions, keys, joining.line if joining.is_open else None)
        metrics = _rendered_by(router) if self.siblings is None else self.siblings.metrics
        own = OwnRoutes(place, proxy, router.places, sessions, metrics, router.objectives)
        usage = UsageRoutes(router.accounting, access, sessions)
        super().__init__(
            routes=[
                *own.routes(),
                *self.page.routes(),
                *self.management.routes(),
                *usage.routes(),
                *self.deployments.routes(),
                *joining.routes(),
            ],
            lifespan=_lifespan,
            exception_handlers=FAILURES,
        )
        self.router.redirect_slashes = False  # /v1 is not /v1/, and a redirect would turn a client's POST into a GET
        self._others: Application = super().__call__
        most_held = int(router.network.door.max_bodies_mib * 2**20)
        if self.siblings is not None:
            self._leave_to_first(partial(FirstWorker, proxy=proxy, siblings=self.siblings, max_body_bytes=most_held))

    def _leave_to_first(self, of: Callable[[Application], Application]) -> None:
        """Let the first worker answer requests for state that only one process can keep."""
        own, first = self._others, of(self._others)
        for service in (RouterService.RESPONSES, RouterService.BATCHES, RouterService.FINETUNES):
            self._services[service] = of(self._services[service])

        def others(scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
            return (own if scope["type"] == "lifespan" or scope["path"] in OWN_PATHS else first)(scope, receive, send)

        self._others = others

    def reload(self, network: NetworkConfig) -> None:
        """Apply settings that may change while the router runs, and deployments by other workers."""
        self.edge.reload(network)
        if self.siblings is not None and not self.siblings.is_first:
            self.deployments.read_again()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Dispatch a request: Starlette handles the router's own routes and unknown paths.
        All others bypass its error handling, which would add two `send` calls to each token."""
        normalize_path(scope)
        if scope["type"] != "websocket":
            app = self._services.get(service_of(scope), self._others)
        else:
            app = self.response_sockets if is_for_responses(scope["path"]) else self.edge.tunnels
        return app(scope, receive, send)

    def _respond(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self._services[RouterService.RESPONSES](scope, receive, send)


def _rendered_by(router: EdgeRouter) -> Callable[[], Awaitable[bytes]]:
    async def render() -> bytes:
        return router.metrics.render()

    return render


def _keeping(network: NetworkConfig) -> RetentionPolicy:
    """Return how long and where responses are kept. Raises ConfigError."""
    kept = network.responses
    if kept.store is None:
        kept.make_directory()
    database = None if kept.store is None else configured("responses.store", partial(_postgres, kept.store))
    path, max_bytes = kept.file_of(f"router-{network.listen.port}"), int(kept.max_gib * 2**30)
    return RetentionPolicy(path, max_bytes, kept.keep_days * 86_400, database)


def _postgres(url: str) -> ResponseDatabase:
    from pilotlight.edge_router.services.shared_responses import PostgresResponses

    return PostgresResponses(url)


@asynccontextmanager
async def _lifespan(app: RouterApp) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        if app.siblings is not None:
            await stack.enter_async_context(app.siblings)
        await stack.enter_async_context(app.edge.running())
        await stack.enter_async_context(background.running(app.feed.run, "the page's feed"))
        stack.push_async_callback(app.responses.close)
        if app.siblings is None:  # else the first worker runs it
            await stack.enter_async_context(background.running(app.responses.run, "the store of responses"))
        yield
