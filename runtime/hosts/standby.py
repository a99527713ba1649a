"""A standby: an engine host that has imported everything and takes over when the serving host dies.

It is prepared when the site has been quiet for a while, because that takes a core for a second or two. It is replaced when it is taken or dies.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.runtime.hosts.host_process import HostProcess
from pilotlight.runtime.hosts.memory import available_bytes, gib
from pilotlight.support import background
from pilotlight.support.time_limits import Pauses, TimeLimit

log = logging.getLogger("pilotlight.engine")

# Private memory of a host with torch imported and no model: 149 MiB measured (torch 2.13, CPU), without libraries that it shares with the serving
# host. Unless the site's file decides, a standby is started if it takes at most 1 / SHARE of the available memory.
HOST_BYTES = 160 << 20
SHARE = 8
LATEST_S = 60.0  # a site that is never quiet starts a standby after this time
FIRST_PAUSE_S = 1.0  # pause after a standby has died; doubled if it lived for less than:
LIVED_S = 60.0
LONGEST_PAUSE_S = 300.0
SILENT_S = 15.0  # a standby is lost after this silence: 30 heartbeats
STOP_GRACE_S = 1.0
_LOOK_EVERY_S = 0.5

State = Literal["off", "waiting", "preparing", "ready"]


class Standby:
    def __init__(
        self,
        launch: Callable[[], Awaitable[HostProcess]],
        wanted: bool | None,
        quiet_since: Callable[[], float | None],
        *,
        quiet_s: float,
        prepare_within_s: float,
        first_pause_s: float = FIRST_PAUSE_S,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        """Set the policy; `run` starts the standby.

        `launch` starts a host as a standby. `wanted`: keep a standby; None to keep one if there is enough memory. `quiet_since` returns the
        time.monotonic() since which the site's host has been idle, or None if it is busy. A standby is prepared after `quiet_s` of idleness, if
        the `available` bytes of memory allow it.
        """
        self._launch = launch
        self._wanted = wanted
        self._quiet_since = quiet_since
        self._prepare_within_s = prepare_within_s
        self._quiet_s = quiet_s
        self._first_pause_s = first_pause_s
        self._available = available
        self.running: HostProcess | None = None  # the standby, if it is ready and not taken
        self._expected: dict[str, ModelSpec] = {}  # specs of models that it may have to load, by name
        self._taken = asyncio.Event()
        self._pause_s = 0.0
        self.state: State = "off"
        self.detail = ""
        self.num_taken = 0

    def take(self) -> HostProcess | None:
        """Hand the standby over to the caller; return None if none is ready."""
        host = self.running
        if host is None or host.client.death is not None:
            return None
        self.running, self.state = None, "waiting"
        self.num_taken += 1
        self._taken.set()
        return host

    def expect(self, spec: ModelSpec) -> None:
        """Have this standby, and later ones, prepare for a model whose weights outlive its host."""
        if spec.weights_file is not None:
            self._expected[spec.name] = spec

    async def run(self) -> None:
        """Keep one standby ready until cancelled, which stops the standby."""
        if self._wanted is False:
            return
        while True:
            self.state = "waiting"
            await self._until_wanted()
            started_at = time.monotonic()
            try:
                why_gone = await self._keep_one()
            except (OSError, EngineError) as error:
                why_gone = str(error)
            except TimeoutError:
                why_gone = f"it was not ready within {self._prepare_within_s:g} s"
            if why_gone is None:
                self._pause_s = 0.0
                continue
            lived = time.monotonic() - started_at >= LIVED_S
            self._pause_s = (
                self._first_pause_s if lived or not self._pause_s else min(LONGEST_PAUSE_S, 2 * self._pause_s)
            )
            log.warning("the standby engine host is lost: %s; the next one in %g s", why_gone, self._pause_s)
            await asyncio.sleep(self._pause_s)

    async def _until_wanted(self) -> None:
        began = time.monotonic()
        while True:
            since, now = self._quiet_since(), time.monotonic()
            is_time = (since is not None and now - since >= self._quiet_s) or now - began >= LATEST_S
            if is_time and self._memory_allows():
                return
            await asyncio.sleep(min(_LOOK_EVERY_S, max(0.01, self._quiet_s)))

    def _memory_allows(self) -> bool:
        available = self._available()
        if self._wanted or available is None or available >= SHARE * HOST_BYTES:
            return True
        need = f"{SHARE} x {gib(HOST_BYTES)} = {gib(SHARE * HOST_BYTES)}"
        detail = f"no standby engine host: {gib(available)} of memory are available, but one needs {need}"
        if self.detail != detail:
            log.info("%s; engine.standby = true keeps one all the same", detail)
        self.detail = detail
        return False

    async def _keep_one(self) -> str | None:
        """Run one standby from launch to end. Return why it was lost, or None if it was taken."""
        self.state, self.detail = "preparing", ""
        self._taken.clear()
        host = await self._launch()
        try:
            async with TimeLimit(self._prepare_within_s):
                await host.client.hello()
            self.running, self.state = host, "ready"
            log.info("a standby engine host is ready (pid %s)", host.pid)
            return await self._until_gone(host)
        finally:
            if not self._taken.is_set():
                self.running = None
                await host.stop(STOP_GRACE_S)

    async def _until_gone(self, host: HostProcess) -> str | None:
        prewarmed: dict[str, ModelSpec] = {}
        pauses = Pauses(_LOOK_EVERY_S)
        exited = asyncio.create_task(host.exited(), name="standby exit")
        taken = asyncio.create_task(self._taken.wait(), name="standby taken")
        try:
            while True:
                for name, spec in self._expected.items():
                    if prewarmed.get(name) != spec:
                        prewarmed[name] = spec
                        host.client.prewarm_model(spec)
                await asyncio.wait({exited, taken}, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if self._taken.is_set():
                    return None
                if exited.done():
                    return exited.result()
                if (death := host.client.death) is not None:
                    return death
                if pauses.silent_s(host.client.last_event_at, time.monotonic()) > SILENT_S:
                    return f"it was silent for {SILENT_S:g} s"
        finally:
            await background.stop(exited, taken)
