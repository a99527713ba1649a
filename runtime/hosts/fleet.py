"""A site's engine hosts, one per device: started, stopped and queried together.

Most sites have one. supervisor.py starts and restarts a host; registry.py and dispatcher.py choose its models.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pilotlight.engine.api.protocol import ModelLoad, StepOutput
from pilotlight.runtime.hosts.launch import ProcessLauncher
from pilotlight.runtime.hosts.supervisor import Supervisor
from pilotlight.runtime.telemetry.timeline import Timeline
from pilotlight.sites.site import EngineConfig


class HostLoad(NamedTuple):
    """The load of one model on one device."""

    device_index: int
    model: str
    load: ModelLoad


class Fleet:
    """All engine hosts of a site. Use as `async with`."""

    def __init__(
        self, launchers: Sequence[ProcessLauncher], config: EngineConfig, timeline: Timeline | None = None
    ) -> None:
        assert len(launchers) in (0, len(config.all_devices)), "one launcher for each device, or none without models"
        self._supervisors = [
            Supervisor(launcher, config, timeline, index=index) for index, launcher in enumerate(launchers)
        ]
        self.hosts = tuple(supervisor.device_host for supervisor in self._supervisors)
        self.standbys = tuple(supervisor.standby for supervisor in self._supervisors)
        self.is_ending = False  # the site shuts down, so sequences of a dead host are not continued

    async def __aenter__(self) -> "Fleet":
        for supervisor in self._supervisors:  # returns at once, because it only starts tasks
            await supervisor.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_ending = True
        await asyncio.gather(*(supervisor.__aexit__() for supervisor in self._supervisors))

    def end(self) -> None:
        """Record that the site drains: sequences of a dead host do not wait for another host."""
        self.is_ending = True

    def fail_open(self, reason: str) -> None:
        """End every open sequence with an error, because the site no longer waits for them."""
        self.is_ending = True
        for host in self.hosts:
            host.end(reason)

    @property
    def why_down(self) -> str | None:
        """The reason why no host responds; None if one does, or if there are no hosts."""
        reasons = [host.why_down for host in self.hosts]
        if not reasons or None in reasons:
            return None
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        for host in self.hosts:
            host.on_step(callback)

    def loads(self) -> Iterator[HostLoad]:
        for host in self.hosts:
            for model, load in host.loads.items():
                yield HostLoad(host.index, model, load)

    @property
    def start_s(self) -> float:
        """The seconds that the slowest start of a host took."""
        return max((host.start_s for host in self.hosts), default=0.0)

    @property
    def died_at(self) -> float:
        """The time of the latest death of a host, on `time.monotonic`'s clock."""
        return max((host.restarts.died_at for host in self.hosts), default=0.0)

    @property
    def restarts(self) -> int:
        return sum(host.restarts.num_restarts for host in self.hosts)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Reasons why hosts compute more slowly than the machine could, as reported when they started."""
        said = [sentence for host in self.hosts if host.ready is not None for sentence in host.ready.fallbacks]
        return tuple(dict.fromkeys(said))

    @property
    def num_up(self) -> int:
        return sum(host.why_down is None for host in self.hosts)
