"""Keeps one device's engine host alive: starts it, watches it, replaces it.

A host that has exited, is not ready in time, or has work and takes no step within its deadline is killed. All sequences open on it fail at once
(continuation.py continues them elsewhere), and the standby takes its place, or a new host is started after a bounded pause (see device_host.py).
Independent of models and requests; the launcher starts hosts.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

from pilotlight.engine.api.client import EngineError
from pilotlight.runtime.hosts.device_host import HostEnd, HostHandle
from pilotlight.runtime.hosts.host_process import HostProcess
from pilotlight.runtime.hosts.launch import ProcessLauncher
from pilotlight.runtime.hosts.standby import Standby
from pilotlight.runtime.telemetry.timeline import Timeline
from pilotlight.sites.site import EngineConfig
from pilotlight.support import background
from pilotlight.support.time_limits import Pauses

log = logging.getLogger("pilotlight.engine")

STANDBY_PREPARE_FACTOR = 5  # a standby may take this many times start_timeout_s, because it is prepared at low priority
SILENT_S = 15.0  # a host without work is replaced after this silence: thirty heartbeats
LIVED_S = 30.0  # a host that was up for so long counts as working, even if it never had a request
STOP_GRACE_S = 3.0
EXIT_S = 1.0  # wait for the end of a process whose socket has closed


class Supervisor:
    """Use as `async with`, whose value is the device's host."""

    def __init__(
        self, launcher: ProcessLauncher, config: EngineConfig, timeline: Timeline | None = None, *, index: int = 0
    ) -> None:
        """Supervise the site's device with this index."""
        self.device_host = HostHandle(config, index)
        self.standby = Standby(
            partial(launcher.launch, standby=True),
            config.standby,
            lambda: self.device_host.quiet_since,
            quiet_s=config.standby_after_s,
            prepare_within_s=STANDBY_PREPARE_FACTOR * config.start_timeout_s,
        )
        self.device_host.on_load(self.standby.expect)
        self._launcher = launcher
        self._timeline = timeline or Timeline()
        self._tick_s = min(0.25, config.step_deadline_s / 4)
        self._pauses = Pauses(self._tick_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HostHandle:
        self._tasks = [
            asyncio.create_task(self._supervise(), name="engine supervisor"),
            background.start(self.standby.run, "keeping a standby engine host"),
        ]
        return self.device_host

    async def __aexit__(self, *_: object) -> None:
        reason = "the site has stopped"
        self.device_host.stop_waiting(reason)
        await background.stop(*self._tasks)
        self._launcher.close()
        self.device_host.set_stopped(reason)

    async def _supervise(self) -> None:
        restarts = self.device_host.restarts
        while True:
            started_at = time.monotonic()
            try:
                reason = await self._run_one()
            except Exception as error:  # the supervisor must survive any exception, because nothing else starts hosts
                log.exception("supervising the engine host")
                reason = f"the engine host could not be supervised: {error!r}"
                self._fail(reason)
            log.error("%s; restarting it", reason)
            if time.monotonic() - started_at > LIVED_S:
                restarts.note_long_life()
            await asyncio.sleep(restarts.pause_s)

    async def _run_one(self) -> str:
        """Run one host from launch to death. Return why it died."""
        device_host, launched_at = self.device_host, time.time()
        afresh = device_host.restarts.wants_afresh
        host = None if afresh else self.standby.take()
        is_fresh = host is None
        try:
            host = host or await self._launcher.launch(afresh=afresh)
        except (OSError, EngineError) as error:
            reason = f"the engine host could not be started: {error}"
            self._fail(reason)
            return reason
        greeting: asyncio.Task[None] | None = None
        try:
            device_host.set_up(host)
            greeting = asyncio.create_task(self._greet(host, launched_at if is_fresh else None), name="engine greeting")
            reason = await self._until_dead(host)
            is_stuck = host.client.death is None and self._why_late() is not None
            if is_stuck and not host.is_suspended:
                device_host.progress.note_late()
            host.client.fail(reason)
            self._timeline.note("engine lost", time.time())
            device_host.set_down(reason)
            end = await self._end_of(host, is_stuck)
            device_host.note_end(host.client, end)
        finally:
            device_host.forget_host()
            if greeting is not None:
                greeting.cancel()
            await host.stop(STOP_GRACE_S if device_host.progress.has_spoken else 0.0)
        device_host.note_exit(end, host.has_crashed)
        return reason

    async def _end_of(self, host: HostProcess, is_stuck: bool) -> HostEnd:
        """Return how a host ended. No sequence is charged if it was ended from outside.

        `is_stuck` means that its process lives but takes no steps.
        """
        if is_stuck:
            return HostEnd(frozenset(() if host.is_suspended else host.held().computed))
        if host.client.failed_under:
            return HostEnd(frozenset(host.client.failed_under))
        with suppress(TimeoutError):  # a socket closes before its process has ended
            await asyncio.wait_for(host.exited(), EXIT_S)
        if not host.ended_by_itself:
            return HostEnd(was_killed=host.was_killed)
        computed, prepared = host.held()
        return HostEnd(frozenset((*computed, *prepared)))

    def _fail(self, reason: str) -> None:
        self._timeline.note("engine lost", time.time())
        self.device_host.note_failure(reason)

    async def _greet(self, host: HostProcess, launched_at: float | None) -> None:
        """Record the host's report; `launched_at` is given if requests wait for its start."""
        began = time.monotonic()
        with suppress(EngineError):  # the host died, which `_until_dead` reports
            self.device_host.ready = ready = await host.client.hello()
            self.device_host.progress.note_ready()
            if launched_at is not None:
                self.device_host.note_start(time.monotonic() - began)
                phases = [(f"engine {name}", seconds) for name, seconds in ready.phases]
                began_s = self._timeline.note_phases(phases, time.time())  # the interpreter started before
                self._timeline.note("engine process", launched_at, max(launched_at, began_s))

    async def _until_dead(self, host: HostProcess) -> str:
        """Wait until the host is dead, or must be treated as dead; return the reason as a sentence."""
        exited = asyncio.create_task(host.exited(), name="engine exit")
        try:
            while not exited.done():
                await asyncio.wait({exited}, timeout=self._tick_s)
                if not exited.done() and (dead := host.client.death or self._why_stuck(host)):
                    return dead
            return exited.result()
        finally:
            await background.stop(exited)

    def _why_stuck(self, host: HostProcess) -> str | None:
        """Return why a live host must be replaced; None while it makes progress or is idle and responsive."""
        is_silent = self._pauses.silent_s(host.client.last_event_at, time.monotonic()) > SILENT_S
        if self.device_host.progress.quiet_since is not None and is_silent:
            return f"the engine host has no work and was silent for {SILENT_S:g} s"
        return self._why_late()

    def _why_late(self) -> str | None:
        return self.device_host.progress.why_stuck(self._pauses.ended_at)
