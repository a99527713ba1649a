"""A site's HTTP application: its parts put together, its routes, its layers.

Everything that lives as long as the site is made here and handed on; nothing is global, so two sites can live in one process.
"""

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from runtime.admission import Admission
from runtime.engines.continuation import Continuations
from runtime.engines.early_host import EarlyHost
from runtime.engines.fleet import Fleet
from runtime.engines.hosts import Launcher
from runtime.engines.launch import launchers_of
from runtime.engines.models import Models
from runtime.engines.slot import Wake
from runtime.engines.weights_tier import open_tier
from runtime.generation import Generator
from runtime.metrics import Metrics
from runtime.middleware.errors import Errors
from runtime.middleware.identity import FUNCTIONS, Identity
from runtime.middleware.unread import UnreadBody
from runtime.routes.health import Health
from runtime.routes.internal import Internal
from runtime.routes.openai import openai_routes
from runtime.routes.workers_ai import workers_ai_routes
from runtime.routing import Application, Route, Router
from runtime.timeline import Timeline
from sites.config import ConfigError
from sites.site import SiteConfig
from wire.credentials import Access, Key
from wire.headers import HOP_SECRET_ENV

if TYPE_CHECKING:
    from runtime.functions.serving import ServedFunctions


def build_app(
    site: SiteConfig,
    *,
    launchers: Sequence[Launcher] | None = None,
    hop_secret: str | None = None,
    early: EarlyHost | None = None,
) -> Application:
    """`launchers` start the engine hosts, one for each device (by default processes, `early` the first); `hop_secret` comes from the environment
    unless given."""
    secret = hop_secret if hop_secret is not None else os.environ.get(HOP_SECRET_ENV) or None
    if site.listen.require_hop and secret is None:
        raise ConfigError(f"site {site.name!r}: listen.require_hop needs the network's secret in {HOP_SECRET_ENV}")
    metrics = Metrics(site.name)
    admission = Admission(site.limits.max_inflight)
    timeline = Timeline()
    fleet = Fleet(launchers or launchers_of(site.engine, site.name, early), site.engine, timeline)
    tier = open_tier(site)

    def wake(wake: Wake) -> None:
        metrics.wake(wake)
        timeline.note_phases(wake.phases, time.time(), wake.model)

    models = Models(site, fleet, tier, on_wake=wake, on_eviction=metrics.evicted, on_scaling=metrics.scaled)
    engine = Continuations(fleet, models, site.limits.continue_within_s, metrics.cut)
    generator = Generator(models, engine, admission, metrics, site.limits.request_timeout_s)

    functions = _functions_of(site, lambda: app)

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[None]:
        try:
            async with fleet:
                models.start()
                try:
                    async with functions or nullcontext():
                        yield
                except ConfigError as error:
                    app.state.why_not_started = str(error)
                    raise
                finally:
                    await models.stop()
        finally:
            if tier is not None:
                tier.close()

    router = Router(
        [
            *openai_routes(generator, site.limits),
            *workers_ai_routes(generator, site.limits),
            *(_routes_to(functions, admission, secret, site.name) if functions is not None else ()),
        ],
        lifespan,
    )
    access = access_of(site)
    identified = Identity(
        Errors(router),
        site=site.name,
        hop_secret=secret,
        require_hop=site.listen.require_hop,
        access=access,
        metrics=metrics,
    )
    app = Application(router, UnreadBody(identified))
    health = Health(
        site, fleet, models, admission, metrics, generator.traffic, _version, lambda: app.state.url, functions
    )
    router.routes.extend((*health.routes(), *Internal(models, timeline, secret).routes()))
    app.state.why_not_started = None
    app.state.functions_path = FUNCTIONS
    app.state.url = None  # known once the socket is bound
    app.state.routes = Errors(router)  # for bindings: the same doors, without the layers that speak to strangers
    app.state.is_busy = lambda model: admission.inflight >= admission.max_inflight or models.has_waiting(model)
    app.state.timeline = timeline
    app.state.admission, app.state.health, app.state.models, app.state.fleet = admission, health, models, fleet
    app.state.functions = functions
    app.state.access = access
    fleet.on_step(metrics.step)
    gauges: dict[str, Callable[[], float]] = {
        "inflight_requests": lambda: admission.inflight,
        "reserved_tokens": lambda: sum(admission.reserved.values()),
        "engine_restarts": lambda: fleet.restarts,
        "engine_standby_ready": lambda: fleet.standbys_ready,
        "engine_standbys_taken": lambda: fleet.standbys_taken,
        "engine_hosts_up": lambda: fleet.num_up,
        "ready": lambda: not health.why_not_ready(),
    }
    metrics.watch(fleet.loads, gauges, models.statuses)
    return app


def access_of(site: SiteConfig) -> Access:
    keys = [Key(key.name, key.key_sha256, key.admin) for key in site.tenants]
    return Access(keys, is_required=site.door.require_key)


def _functions_of(site: SiteConfig, app: Callable[[], Application]) -> "ServedFunctions | None":
    """None where the site file names no function: what serves them takes a tenth of a second to import. Raises ManifestError."""
    config = site.functions
    if not config.serve and config.directory is None and config.deployments is None:
        return None
    from runtime.functions.serving import ServedFunctions, state_dir_of

    return ServedFunctions(config, state_dir_of(site), app)


def _routes_to(functions: "ServedFunctions", admission: Admission, secret: str | None, site: str) -> Iterator[Route]:
    from runtime.routes.deployments import deployment_routes
    from runtime.routes.functions import function_routes

    yield from function_routes(functions, admission)
    yield from deployment_routes(functions, secret, site)


@cache
def _version() -> str:
    """Asked for by the first status, not by a start: who finds it in an installation's metadata imports for 4 ms."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pilotlight")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"
