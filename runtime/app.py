"""A site as a Starlette application: its routes and middleware."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount

from pilotlight.page.feed import Feed
from pilotlight.page.management import ManagementRoutes
from pilotlight.page.routes import PageRoutes
from pilotlight.page.sessions import Sessions
from pilotlight.runtime.api.middleware import FUNCTIONS, UNROUTED, SiteMiddleware
from pilotlight.runtime.api.routes.anthropic import anthropic_routes
from pilotlight.runtime.api.routes.decisions import decision_routes
from pilotlight.runtime.api.routes.finetune_routes import FinetuneRoutes
from pilotlight.runtime.api.routes.health import Health
from pilotlight.runtime.api.routes.internal import Internal
from pilotlight.runtime.api.routes.ollama import ollama_routes
from pilotlight.runtime.api.routes.openai_responses import ResponsesEndpoint
from pilotlight.runtime.api.routes.openai_routes import openai_routes
from pilotlight.runtime.api.routes.rerank import scoring_routes
from pilotlight.runtime.api.routes.workers_ai import workers_ai_routes
from pilotlight.runtime.hosts.launch import ProcessLauncher, launchers_of
from pilotlight.runtime.hosts.memory_budget import model_bytes
from pilotlight.runtime.management.operator import OwnSite
from pilotlight.runtime.models.adapters import refuse_unusable
from pilotlight.runtime.site import Site
from pilotlight.runtime.telemetry.activity import SiteActivity
from pilotlight.runtime.telemetry.recent_generations import described
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import SiteConfig
from pilotlight.support import background
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.http.route_index import RouteIndex

if TYPE_CHECKING:
    from pilotlight.functions.service import FunctionsService


def build_app(
    config: SiteConfig,
    *,
    launchers: Sequence[ProcessLauncher] | None = None,
    hop_secret: str | None = None,
    url: str | None = None,
    functions_path: str = FUNCTIONS,
    timings: SiteTimings = SiteTimings(),  # noqa: B008 - frozen
) -> "SiteApp":
    """Return a site's application.

    `launchers` start the engine hosts, one per device; the default starts processes. `hop_secret` defaults to the secret in the environment. `url` is
    the site's address. `functions_path` is the start of the paths that functions answer. Raises ConfigError.
    """
    secret = hop_secret if hop_secret is not None else os.environ.get(HOP_SECRET_ENV) or None
    if config.listen.require_hop and secret is None:
        raise ConfigError(f"site {config.name!r}: listen.require_hop needs the network's secret in {HOP_SECRET_ENV}")
    refuse_unusable(config.models)
    if launchers is None:  # without a model no engine host is needed
        has_models = bool(config.models)
        launchers = launchers_of(config.engine, config.name, partial(model_bytes, config)) if has_models else ()
    return SiteApp(Site(config, launchers, url, timings), secret, functions_path)


class SiteApp(Starlette):
    """A site's application, with the attributes that its process uses to start, drain and reload it."""

    def __init__(self, site: Site, secret: str | None, functions_path: str) -> None:
        self.site = site
        generator, limits = site.generator, site.config.limits
        self.responses = ResponsesEndpoint(generator, site.config, site.access)
        models = [
            *openai_routes(generator, limits),
            *scoring_routes(generator, limits),
            *anthropic_routes(generator, limits),
            *self.responses.routes(),
            *decision_routes(generator, limits),
            *ollama_routes(generator, limits),
            *workers_ai_routes(generator, limits, site.is_busy),
            *FinetuneRoutes(site.models.registry, site.models.adapters).routes(),
        ]
        self.functions = _functions_of(site, secret)
        self.functions_path = functions_path
        self._health = Health(site, self.functions)
        self.feed = Feed(SiteActivity(self._health.site_status, site.metrics.requests))
        sessions = Sessions(site.access, secret or "")
        self._page = PageRoutes(
            self.feed, sessions, functions=self.functions, timeline=self._timeline, requests=self._requests
        )
        own = OwnSite(site.config.name, site.operator, None if self.functions is None else self.functions.stores)
        self._management = ManagementRoutes(own, sessions)
        middleware = Middleware(
            SiteMiddleware,
            site=site.config.name,
            hop_secret=secret,
            require_hop=site.config.listen.require_hop,
            access=site.access,
            metrics=site.metrics,
            tracing=site.tracing,
            functions_path=functions_path,
        )
        super().__init__(
            routes=[RouteIndex([*models, *self._own_routes(secret)])],
            middleware=[middleware],
            exception_handlers=UNROUTED,
            lifespan=_lifespan,
        )
        self.router.redirect_slashes = False

    async def _requests(self) -> bytes:
        return msgspec.json.encode(
            {"requests": [described(each, self.site.config.name) for each in self.site.generator.recent.times]}
        )

    async def _timeline(self, site: str) -> bytes:
        return msgspec.json.encode({"spans": self.site.timeline.spans})

    def routes_beside(self, at: str) -> Mount:
        """Return the page and the API that it calls, to be mounted in another application."""
        return Mount(
            at,
            routes=[
                *self._page.routes(),
                *self._management.routes(),
                *openai_routes(self.site.generator, self.site.config.limits),
            ],
        )

    def _own_routes(self, secret: str | None) -> Iterator[BaseRoute]:
        if self.functions is not None:
            yield from self.functions.routes()
        yield from self._health.routes()
        site = self.site
        yield from self._page.routes()
        yield from self._management.routes()
        yield from Internal(site.models, site.operator, site.generator.recent, site.timeline, secret).routes()


@asynccontextmanager
async def _lifespan(app: SiteApp) -> AsyncIterator[None]:
    async with app.site.running(), app.functions or nullcontext():
        feed = background.running(app.feed.run, "the page's feed")
        sweep = background.running(app.responses.keeping.run, "the sweep of kept responses")
        try:
            async with feed, sweep:
                yield
        finally:
            await app.responses.keeping.close()
            if app.site.tracing is not None:
                await asyncio.to_thread(app.site.tracing.close)


def _functions_of(site: Site, secret: str | None) -> "FunctionsService | None":
    """Return the site's functions, or None if its file names none.

    Imports their packages only if the file names functions, because the import takes 0.1 s. Raises ManifestError."""
    if not site.config.functions.are_served:
        return None
    from pilotlight.functions.service import FunctionsService
    from pilotlight.runtime.generation.inference import SiteInference

    trace = None if site.tracing is None else site.tracing.invocation
    functions = FunctionsService(site.config, SiteInference(site), site.admission, site.own_ports, secret, trace)
    site.metrics.watch_function_logs(functions.dropped_log_records)
    return functions
