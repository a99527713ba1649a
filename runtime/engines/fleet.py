"""A site's engine hosts, one for each of its devices: started and stopped together, and asked together how they are.

Most sites have one. Each host's life is its own (hosts.py); which model lives where is models.py's and dispatch.py's business.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.protocol import ModelLoad, StepOutput
from runtime.engines.device_host import DeviceHost, Launcher
from runtime.timeline import Timeline
from sites.site import EngineConfig


class HostLoad(NamedTuple):
    """How busy one model is on one device."""

    device_index: int
    model: str
    load: ModelLoad


class Fleet:
    """Use as `async with`."""

    def __init__(self, launchers: Sequence[Launcher], config: EngineConfig, timeline: Timeline | None = None) -> None:
        assert len(launchers) == len(config.all_devices), "one launcher for each device"
        self.hosts = tuple(
            DeviceHost(launcher, config, timeline, index=index) for index, launcher in enumerate(launchers)
        )

    async def __aenter__(self) -> "Fleet":
        for host in self.hosts:  # each only starts its tasks
            await host.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(host.__aexit__() for host in self.hosts))

    @property
    def is_ending(self) -> bool:
        """The site stops: what dies from now on is not continued."""
        return any(host.is_ending for host in self.hosts)

    def end(self) -> None:
        for host in self.hosts:
            host.is_ending = True

    def fail_open(self, reason: str) -> None:
        """Ends every open sequence with an error: the site will not wait for them any longer."""
        for host in self.hosts:
            host.fail_open(reason)

    @property
    def why_down(self) -> str | None:
        """None while one of them answers."""
        reasons = [host.why_down for host in self.hosts]
        if None in reasons:
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
    def restarts(self) -> int:
        return sum(host.restarts for host in self.hosts)

    @property
    def standbys_ready(self) -> int:
        return sum(host.standby.state == "ready" for host in self.hosts)

    @property
    def standbys_taken(self) -> int:
        return sum(host.taken_standbys for host in self.hosts)

    @property
    def num_up(self) -> int:
        return sum(host.why_down is None for host in self.hosts)
