"""The life of one device's engine host: started, watched, restarted.

Liveness is token progress (I5): a host that has exited, that never answered, or that has work and takes no step inside its deadline is killed;
every sequence open on it fails at once (continuation.py goes on with it elsewhere), and the standby takes its place, or a new host is started
after a bounded pause. The module refuses to know models, text, HTTP and its siblings (fleet.py); how a host is started is its launcher's business.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal, Protocol

from engine.client import EngineClient, EngineError, ProgressCallback
from engine.protocol import HostReady, ModelInfo, ModelLoad, ModelSpec, StepOutput, Submit, TokenOutput
from runtime.engines.standby import Standby
from runtime.timeline import Timeline
from sites.site import EngineConfig

log = logging.getLogger("pilotlight.engine")

FIRST_PAUSE_S = 0.2  # before the second restart in a row; doubled for each further host that does not live, up to:
LONGEST_PAUSE_S = 10.0
LIVED_S = 30.0  # a host that was up for so long has lived, even if it never had work
STOP_GRACE_S = 3.0
STANDBY_PATIENCE = 5  # times start_timeout_s: it is made ready at low priority
AFRESH_AFTER = 2  # hosts in a row that crashed before they had answered anything
HOPELESS_AFTER = 3  # hosts in a row that did not live: requests are then sent elsewhere instead of kept waiting

State = Literal["starting", "up", "restarting", "stopped"]


class RunningHost(Protocol):
    """A started host process (or what stands for one in a test)."""

    @property
    def client(self) -> EngineClient: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def url(self) -> str | None:
        """Where its socket listens."""

    async def exited(self) -> str:
        """Returns when the process has ended: a sentence that says how."""

    @property
    def has_crashed(self) -> bool:
        """It has ended by a signal that damaged code or a damaged file under a map ends in."""

    async def stop(self, grace_s: float) -> None:
        """Asks it to end, and kills it after `grace_s`. Harmless on one that has ended."""


class Launcher(Protocol):
    async def launch(self, *, standby: bool = False, afresh: bool = False) -> RunningHost:
        """`standby`: nobody waits for it; it is made ready thoroughly and out of everybody's way. `afresh`: it believes no file that hosts before it
        have generated, and removes them."""

    def close(self) -> None:
        """No further host is launched, and the last has ended."""


class DeviceHost:
    """The engine host of one device, through all its restarts. Use as `async with`."""

    def __init__(
        self,
        launcher: Launcher,
        config: EngineConfig,
        timeline: Timeline | None = None,
        *,
        index: int = 0,
    ) -> None:
        """`index`: of the device among those of the site."""
        self.index = index
        self.device = config.all_devices[index]
        self._launcher = launcher
        self._config = config
        self._timeline = timeline or Timeline()
        self.on_down: Callable[[str], None] = lambda reason: None
        self.on_up: Callable[[], None] = lambda: None
        self.state: State = "starting"
        self.reason = "the engine host is starting"  # why the state is not "up"
        self.restarts = 0
        self.is_ending = False  # the site stops: what dies from now on is not continued
        self._ended: str | None = None  # why nothing open is waited for any longer
        self._failures = 0  # hosts in a row that did not live
        self._crashes = 0  # those of them that crashed
        self._last_death = ""
        self._host: RunningHost | None = None
        self._changed = asyncio.Event()  # replaced at every change of host
        self._work = 0  # sequences and loads under way
        self._progress_at = 0.0
        self._heard = False  # whether this host has sent anything yet
        self._last_step = -1
        self._idle_since = time.monotonic()
        self._observers: list[Callable[[StepOutput], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.standby = Standby(
            launcher,
            config.standby,
            self._quiet_since,
            quiet_s=config.standby_after_s,
            prepare_within_s=STANDBY_PATIENCE * config.start_timeout_s,
        )
        self.ready: HostReady | None = None  # what the newest host to say so said of itself; the device stays the same
        self.taken_standbys = 0

    async def __aenter__(self) -> "DeviceHost":
        self._tasks = [
            asyncio.create_task(self._supervise(), name="engine supervisor"),
            asyncio.create_task(self.standby.run(), name="engine standby"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_ending, self._ended = True, "the site has stopped"
        self._notify()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._launcher.close()
        self.state, self.reason = "stopped", self._ended

    @property
    def client(self) -> EngineClient | None:
        """The host's client, while there is a host."""
        return self._host.client if self._host is not None else None

    @property
    def pid(self) -> int | None:
        return self._host.pid if self._host is not None else None

    @property
    def url(self) -> str | None:
        return self._host.url if self._host is not None else None

    @property
    def why_down(self) -> str | None:
        """None while there is a host that answers. A closed socket tells of a death before the process's exit is seen."""
        if self.state != "up" or self._host is None:
            return self.reason
        return self._host.client.death

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """The newest of every model it holds, by name."""
        return self._host.client.loads if self._host is not None else {}

    @property
    def is_hopeless(self) -> bool:
        """Host after host does not live."""
        return self._failures >= HOPELESS_AFTER

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Call back for every frame of every host there will be."""
        self._observers.append(callback)

    async def next_client(self, after: EngineClient | None = None) -> EngineClient:
        """Waits for a host whose client is not `after`. Raises EngineError when host after host does not live, or the
        site waits for none."""
        while True:
            if self._ended is not None:
                raise EngineError("engine_error", self._ended)
            client = self.client
            if client is not None and client is not after:
                return client
            if self.is_hopeless:
                message = f"this site's engine host does not start ({self._last_death}); try another site"
                raise EngineError("overloaded", message)
            await self._changed.wait()

    async def until_changed(self) -> None:
        """Returns when a host comes or goes, or nothing is waited for any longer."""
        await self._changed.wait()

    async def until_ready(self) -> None:
        """Returns once a host has said what it found."""
        while self.ready is None:
            client = await self.next_client()
            with suppress(EngineError):
                self.ready = await client.hello()
                return
            await self.next_client(after=client)

    async def load_model(self, client: EngineClient, spec: ModelSpec, on_progress: ProgressCallback) -> ModelInfo:
        def note(done: int, total: int) -> None:
            self._progress_at = time.monotonic()  # bytes are progress too: large models take longer than a step may
            on_progress(done, total)

        with self._working():
            return await client.load_model(spec, note)

    async def unload_model(self, name: str) -> None:
        """From the present host."""
        client = self.client
        if client is None:
            raise EngineError("engine_error", self.reason)
        with self._working():
            await client.unload_model(name)

    @asynccontextmanager
    async def generate(self, submit: Submit) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        """A sequence's scope on the present host."""
        client = self.client
        if client is None or client.death is not None:
            raise EngineError("overloaded", f"{self.why_down}; try again in a moment")
        with self._working():
            async with client.generate(submit) as outputs:
                yield outputs

    @contextmanager
    def _working(self) -> Iterator[None]:
        """What is under way inside is work: the host must make progress meanwhile."""
        if self._work == 0:
            self._progress_at = time.monotonic()
        self._work += 1
        try:
            yield
        finally:
            self._work -= 1
            self._idle_since = time.monotonic()

    def _quiet_since(self) -> float | None:
        """Since when the host has answered and had no work: the time at which a standby costs nobody anything."""
        return self._idle_since if self.state == "up" and self._heard and not self._work else None

    def fail_open(self, reason: str) -> None:
        """Ends every open sequence with an error: the site will not wait for them any longer."""
        self.is_ending, self._ended = True, reason
        self._notify()
        if self.client is not None:
            self.client.fail(reason)

    async def _supervise(self) -> None:
        while True:
            started_at = time.monotonic()
            try:
                reason = await self._run_one()
            except Exception as error:  # whatever it is, the site must not be left without anyone who starts hosts
                log.exception("supervising the engine host")
                reason = self._down(f"the engine host could not be supervised: {error!r}")
            self.restarts += 1
            log.error("%s; restarting it", reason)
            if time.monotonic() - started_at > LIVED_S:
                self._failures = 0
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """None after a first death: most hosts that die have lived well, and their models are missed."""
        return 0.0 if self._failures < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 2))

    async def _run_one(self) -> str:
        """One host from launch to death; returns why it died."""
        launched_at = time.time()
        afresh = self._crashes >= AFRESH_AFTER
        host = None if afresh else self.standby.take()
        is_fresh = host is None
        self.taken_standbys += not is_fresh
        try:
            host = host or await self._launcher.launch(afresh=afresh)
        except (OSError, EngineError) as error:
            return self._down(f"the engine host could not be started: {error}")
        greeting: asyncio.Task[None] | None = None
        try:
            self._up(host)
            greeting = asyncio.create_task(self._greet(host, launched_at if is_fresh else None), name="engine greeting")
            reason = await self._watch(host)
            host.client.fail(reason)
            return self._down(reason)
        finally:
            self._host = None
            if greeting is not None:
                greeting.cancel()
            await host.stop(STOP_GRACE_S if self._heard else 0.0)
            self._crashes = self._crashes + 1 if host.has_crashed else 0

    async def _greet(self, host: RunningHost, launched_at: float | None) -> None:
        """`launched_at`: of a host whose start somebody waits for."""
        with suppress(EngineError):  # it died: whoever watches it knows
            self.ready = await host.client.hello()
            if launched_at is not None:
                phases = [(f"engine {name}", seconds) for name, seconds in self.ready.phases]
                began_s = self._timeline.note_phases(phases, time.time())  # and before that the interpreter's own start
                self._timeline.note("engine process", launched_at, max(launched_at, began_s))

    def _up(self, host: RunningHost) -> None:
        self._idle_since = time.monotonic()
        self._heard, self._last_step, self._progress_at = False, -1, time.monotonic()
        host.client.on_step(self._note_step)
        self._host = host
        self.state, self.reason = "up", ""
        self._notify()
        self.on_up()

    def _down(self, reason: str) -> str:
        self._host = None
        self._heard = False  # it is not asked politely: its process is gone or hangs
        self.state, self.reason = "restarting", reason
        self._last_death = reason
        self._failures += 1
        self._timeline.note("engine lost", time.time())
        self._notify()
        self.on_down(reason)
        return reason

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_step(self, step: StepOutput) -> None:
        self._heard = True
        has_answered = any(output.finish_reason not in ("error", "abort") for output in step.outputs)
        if has_answered:
            self._failures = self._crashes = 0  # it lives
        if has_answered or step.step != self._last_step:
            self._last_step, self._progress_at = step.step, time.monotonic()
        for observer in self._observers:
            observer(step)

    async def _watch(self, host: RunningHost) -> str:
        """Returns when the host is dead, or has to be treated as dead."""
        exited = asyncio.create_task(host.exited(), name="engine exit")
        tick_s = min(0.25, self._config.step_deadline_s / 4)
        try:
            while not exited.done():
                await asyncio.wait({exited}, timeout=tick_s)
                if not exited.done() and (dead := host.client.death or self._stuck()) is not None:
                    return dead
            return exited.result()
        finally:
            exited.cancel()
            await asyncio.wait({exited})  # which raises only when this task is cancelled as well

    def _stuck(self) -> str | None:
        silent_s = time.monotonic() - self._progress_at
        if not self._work:
            return None
        if not self._heard:
            limit_s = self._config.start_timeout_s
            return f"the engine host did not answer within {limit_s:g} s" if silent_s > limit_s else None
        limit_s = self._config.step_deadline_s
        return f"the engine host has work and took no step for {limit_s:g} s" if silent_s > limit_s else None
