"""The parts of a site: engine hosts, models, admission, counters and access.

They live as long as the site, and nothing is global, so two sites can run in one process. Independent of HTTP (app.py) and functions.
"""

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pilotlight.runtime.dispatch.continuation import Continuations
from pilotlight.runtime.generation.admission import Admission
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.grammar_checks import GrammarChecks
from pilotlight.runtime.generation.images import ImageReader
from pilotlight.runtime.hosts.fleet import Fleet
from pilotlight.runtime.hosts.launch import ProcessLauncher
from pilotlight.runtime.hosts.memory_budget import open_tier
from pilotlight.runtime.management.operator import SiteOperator
from pilotlight.runtime.models.finetunes import FinetuneStore
from pilotlight.runtime.models.registry import Models
from pilotlight.runtime.models.wake_history import Wake
from pilotlight.runtime.telemetry.metrics import Metrics
from pilotlight.runtime.telemetry.timeline import Timeline
from pilotlight.runtime.telemetry.tracing import SiteTracing
from pilotlight.runtime.telemetry.traffic import Traffic
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import SiteConfig
from pilotlight.support.version import own_version
from pilotlight.wire.credentials import Access, known_keys
from pilotlight.wire.hop.status import ProcessStatus


class Site:
    """A site's parts. They run inside the scope `async with site.running()`."""

    def __init__(
        self,
        config: SiteConfig,
        launchers: Sequence[ProcessLauncher],
        url: str | None = None,
        timings: SiteTimings = SiteTimings(),  # noqa: B008 - frozen
    ) -> None:
        """Create the parts.

        `launchers` start the engine hosts, one per device; `url` is the site's address, if any.
        """
        self.config = config
        self.url = url
        self.access = access_of(config)
        self.metrics = Metrics(config.name)
        self.timeline = Timeline()
        self.tracing = SiteTracing.of(config.telemetry, config.name, own_version())
        self.admission = Admission(config.limits.max_inflight)
        self.fleet = Fleet(launchers, config.engine, self.timeline)
        self.finetunes = finetunes_of(config)
        self._tier = open_tier(config)
        traffic = Traffic()
        self.models = Models(
            config,
            self.fleet,
            self._tier,
            on_wake=self._note_wake,
            on_eviction=self.metrics.engines.evicted,
            on_scaling=self.metrics.engines.scaled,
            on_lost=traffic.forget,
            finetunes=self.finetunes,
            timings=timings,
        )
        self.operator = SiteOperator(config, self.models)
        observers = self.metrics.engines.cut, self.metrics.engines.placed
        engine = Continuations(self.fleet, self.models.dispatch, config.limits.continue_within_s, *observers)
        self.generator = Generator(
            self.models,
            engine,
            self.admission,
            self.metrics.requests,
            traffic,
            config.limits.request_timeout_s,
            ImageReader(config.images, config.limits.max_body_mib),
            GrammarChecks(),
            self.tracing,
            timings.held_back_s,
        )
        self.fleet.on_step(self.metrics.engines.step)
        self.metrics.watch(
            self.fleet.loads,
            self._gauges(),
            self.models.registry.statuses,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with self.fleet:
                self.operator.serve_added()
                self.models.start()
                try:
                    yield
                finally:
                    await self.operator.close()
                    await self.models.stop()
        finally:
            self.generator.grammars.close()
            if self._tier is not None:
                self._tier.close()

    def drain(self) -> None:
        """Admit no further requests."""
        self.admission.drain()
        self.models.drain()
        self.fleet.end()

    def why_not_ready(self) -> list[str]:
        """Return why the site is not ready.

        The list is empty if the site does not drain, an engine host responds or none is needed, and the pinned models are on a device."""
        reasons = ["the site is draining"] if self.admission.draining else []
        if (why := self.fleet.why_down) is not None:
            return [*reasons, why]
        return reasons + self.models.registry.missing()

    def is_busy(self, model: str) -> bool:
        """Return whether a request for the model would be queued or refused."""
        return self.admission.inflight >= self.admission.max_inflight or self.models.registry.has_waiting(model)

    def own_ports(self) -> list[int]:
        """The TCP ports that this process listens on."""
        return [] if self.url is None else [int(self.url.rpartition(":")[2])]

    def processes(self) -> list[ProcessStatus]:
        name = self.config.name
        found = [ProcessStatus("site", os.getpid(), name, self.url)]
        for host, standby in zip(self.fleet.hosts, self.fleet.standbys, strict=True):
            if (engine := host.running) is not None and engine.pid is not None:
                found.append(ProcessStatus("engine", engine.pid, name, engine.url, host.device, host.role))
            if (waiting := standby.running) is not None and waiting.pid is not None:
                found.append(ProcessStatus("standby", waiting.pid, name, waiting.url, host.device))
        return found

    def _note_wake(self, wake: Wake) -> None:
        self.metrics.engines.wake(wake)
        self.timeline.note_phases(wake.phases, time.time(), wake.model)

    def _gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        admission, fleet, hosts, standbys = self.admission, self.fleet, self.fleet.hosts, self.fleet.standbys
        return {
            "inflight_requests": ("Requests in progress", lambda: admission.inflight),
            "reserved_tokens": (
                "Tokens reserved for requests in progress",
                lambda: sum(admission.reserved.values()),
            ),
            "engine_restarts": ("Engine hosts that were restarted", lambda: fleet.restarts),
            "engine_standby_ready": (
                "Standby hosts that are ready",
                lambda: sum(standby.state == "ready" for standby in standbys),
            ),
            "engine_standbys_taken": (
                "Standby hosts that replaced an engine host",
                lambda: sum(standby.num_taken for standby in standbys),
            ),
            "engine_hosts_up": ("Engine hosts that are running", lambda: fleet.num_up),
            "engine_hosts_shifted": (
                "Engine hosts that also have the other role",
                lambda: sum(host.role != host.own_role for host in hosts),
            ),
            "ready": ("1 if the site is ready, else 0", lambda: not self.why_not_ready()),
        }


def finetunes_of(config: SiteConfig) -> FinetuneStore | None:
    """Return the store of uploaded adapters, or None if the site accepts no uploads. Raises ConfigError."""
    if config.finetunes.directory is None:
        return None
    directory = Path(config.finetunes.directory).expanduser().absolute() / config.name
    try:
        return FinetuneStore(directory, config.finetunes)
    except OSError as error:
        raise ConfigError(f"finetunes.directory {directory} cannot be used: {error.strerror}") from None


def access_of(config: SiteConfig) -> Access:
    return Access(known_keys(config.accounts, config.keys), is_required=config.door.require_key)
