"""The handle of one device's engine host, which stays the same when the process is replaced.

Callers send requests through it and wait for the next process. It also tracks progress and deaths. supervisor.py starts and stops the processes;
fleet.py has the other devices.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from pilotlight.engine.api.client import EngineClient, EngineError, ProgressCallback
from pilotlight.engine.api.protocol import HostReady, LoadProgress, ModelInfo, ModelLoad, ModelSpec, StepOutput
from pilotlight.runtime.hosts.host_process import HostProcess
from pilotlight.sites.site import EngineConfig

FIRST_PAUSE_S = 0.2  # pause before the second restart in a row; doubled for each later failure, up to:
LONGEST_PAUSE_S = 10.0
AFRESH_AFTER = 2  # if so many hosts in a row crash before any answer, the next one deletes compiled files
END_KNOWN_WITHIN_S = 3.0  # time limit, after a host's death, for its cause and the sequences it was working on
DEADLINE_FACTOR = 10  # a step may take this multiple of its predicted time: contexts grow, and a machine has other work
MOST_DOUBLINGS = 6  # a step's deadline is doubled this often at most: 30 s become half an hour
HOPELESS_AFTER = 3  # after so many failed hosts in a row, requests are sent elsewhere instead of waiting

State = Literal["starting", "up", "restarting", "stopped"]


class HostEnd(NamedTuple):
    """The end of an engine host."""

    charged: frozenset[str] = frozenset()  # the sequences on which it was working when it crashed
    was_killed: bool = False  # by a signal from outside, and not for memory


class HostHandle:
    def __init__(self, config: EngineConfig, index: int = 0) -> None:
        """Make the handle of a host that has not been started.

        `index` is the device's position among the site's devices.
        """
        self.index = index
        self.device = config.all_devices[index]
        self.own_role = config.roles[index]
        self.role = self.own_role  # changes with the load (roles.py)
        self.progress = ProgressWatch(config.start_timeout_s, config.step_deadline_s, config.max_num_batched_tokens)
        self.restarts = RestartHistory()
        self.state: State = "starting"
        self.reason = "the engine host is starting"  # why the state is not "up"
        self.ready: HostReady | None = None  # report of the newest host; its facts about the device stay true
        self.running: HostProcess | None = None
        self.start_s = 0.0  # seconds from launch until ready of the slowest start; 0.0 before the first one
        self._ends: WeakKeyDictionary[EngineClient, HostEnd] = WeakKeyDictionary()  # by the dead host's client
        self._ended: str | None = None  # why sequences wait for no further host
        self.changed = ChangeNotifier()  # notifies when a host has started or gone, or none will follow
        self._step_observers: list[Callable[[StepOutput], None]] = []
        self._load_observers: list[Callable[[ModelSpec], None]] = []
        self._change_observers: list[tuple[Callable[[], None], Callable[[HostHandle, str], None]]] = []

    @property
    def client(self) -> EngineClient | None:
        """The present host's client; None while there is no host."""
        return self.running.client if self.running is not None else None

    @property
    def peer_address(self) -> str | None:
        """The address at which the host serves its KV blocks to other hosts; None without a host or a service."""
        return self.running.peer_address if self.running is not None else None

    @property
    def why_down(self) -> str | None:
        """The reason why no host answers; None if one does.

        A closed socket shows a death before the process has exited.
        """
        if self.state != "up" or self.running is None:
            return self.reason
        return self.running.client.death

    @property
    def quiet_since(self) -> float | None:
        """The time since which the host is up and has no work; None if it is down or has some."""
        return self.progress.quiet_since if self.state == "up" else None

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """The newest load of each model on the host, by name."""
        return self.running.client.loads if self.running is not None else {}

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Register a callback for every step output, of the present host and of later ones."""
        self._step_observers.append(callback)

    def on_load(self, callback: Callable[[ModelSpec], None]) -> None:
        """Register a callback for every model that a host has loaded."""
        self._load_observers.append(callback)

    def on_change(self, up: Callable[[], None], down: "Callable[[HostHandle, str], None]") -> None:
        """Register two callbacks: `up` after a host has started, `down` with the reason after a host has gone."""
        self._change_observers.append((up, down))

    def serving_client(self) -> EngineClient:
        """Return the present host's client. Raises EngineError if no host answers."""
        client = self.client
        if client is None or client.death is not None:
            raise EngineError("overloaded", f"{self.why_down}; try again in a moment")
        return client

    async def next_client(self, after: EngineClient | None = None) -> EngineClient:
        """Wait for a host whose client is not `after`.

        Raises EngineError if several hosts in a row have failed, or the site is stopping.
        """
        while True:
            if self._ended is not None:
                raise EngineError("engine_error", self._ended)
            client = self.client
            if client is not None and client is not after:
                return client
            if self.restarts.is_hopeless:
                message = f"this site's engine host does not start ({self.restarts.last_death}); try another site"
                raise EngineError("overloaded", message)
            await self.changed.wait()

    async def end_of(self, client: EngineClient) -> HostEnd:
        """Return how this client's host ended; wait until that is known, or for END_KNOWN_WITHIN_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_KNOWN_WITHIN_S):
                while client not in self._ends:
                    await self.changed.wait()
        return self._ends.get(client, HostEnd())

    async def until_ready(self) -> None:
        """Return once a host has reported its device."""
        while self.ready is None:
            client = await self.next_client()
            with suppress(EngineError):
                self.ready = await client.hello()
                return
            await self.next_client(after=client)

    async def load_model(self, client: EngineClient, spec: ModelSpec, on_progress: ProgressCallback) -> ModelInfo:
        def note(progress: LoadProgress) -> None:
            self.progress.note_bytes()
            on_progress(progress)

        with self.progress.expected():
            info = await client.load_model(spec, note)
        for observer in self._load_observers:
            observer(spec)
        return info

    async def unload_model(self, name: str) -> None:
        """Unload a model from the present host."""
        client = self.client
        if client is None:
            raise EngineError("engine_error", self.reason)
        with self.progress.expected():
            await client.unload_model(name)

    def end(self, reason: str) -> None:
        """End every open sequence with an error: the site waits for them no longer."""
        self.stop_waiting(reason)
        if self.client is not None:
            self.client.fail(reason)

    def stop_waiting(self, reason: str) -> None:
        """Record that no further host will start."""
        self._ended = reason
        self.changed.notify_all()

    def set_up(self, host: HostProcess) -> None:
        """Use the host that the supervisor has started."""
        self.progress.begin()
        host.client.on_step(self._note_step)
        self.running = host
        self.state, self.reason = "up", ""
        self.changed.notify_all()
        for up, _ in self._change_observers:
            up()

    def set_down(self, reason: str) -> None:
        """Record that the host is gone, or is treated as gone."""
        self.running = None
        self.progress.end()
        self.state, self.reason = "restarting", reason
        self.restarts.note_death(reason)
        self.changed.notify_all()
        for _, down in self._change_observers:
            down(self, reason)

    def note_end(self, client: EngineClient, end: HostEnd) -> None:
        self._ends[client] = end
        self.changed.notify_all()

    def note_exit(self, end: HostEnd, has_crashed: bool) -> None:
        """Record that the host's process is gone."""
        self.restarts.note_exit(
            has_crashed=has_crashed, has_computed=self.progress.has_computed, was_killed=end.was_killed
        )
        self.changed.notify_all()

    def note_failure(self, reason: str) -> None:
        """Record that no host could be launched."""
        self.set_down(reason)
        self.restarts.note_failure()
        self.changed.notify_all()

    def note_start(self, start_s: float) -> None:
        """Record the seconds from a launch until the host was ready."""
        self.start_s = max(self.start_s, start_s)

    def forget_host(self) -> None:
        """Stop using the host: its process is being stopped."""
        self.running = None

    def set_stopped(self, reason: str) -> None:
        self.state, self.reason = "stopped", reason

    def _note_step(self, step: StepOutput) -> None:
        if self.progress.note_step(step):
            self.restarts.note_answer()
        for observer in self._step_observers:
            observer(step)


class ProgressWatch:
    """Checks that a host is ready in time, and later takes steps in time while it has work."""

    def __init__(
        self,
        start_timeout_s: float,
        step_deadline_s: float,
        largest_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch no host yet.

        `step_deadline_s` is the shortest deadline of a step; it grows if this machine takes longer for a step of `largest_step` tokens.
        """
        self._clock = clock
        self._start_timeout_s = start_timeout_s
        self._least_deadline_s = step_deadline_s
        self._largest_step = largest_step
        self._predicted_s = 0.0  # predicted time of the largest step, by the slowest model's measured rate
        self._num_late = 0  # hosts in a row that missed the deadline before their first step ended
        self.has_spoken = False  # the present host has sent a message
        self.has_computed = False  # the newest host has completed a step
        self._is_ready = False  # the host can load a model; before that it imports, and sends heartbeats
        self._work = 0  # sequences and loads in progress
        self._progress_at = 0.0
        self._last_step = -1
        self._idle_since = self._clock()

    @property
    def has_work(self) -> bool:
        return self._work > 0

    @property
    def quiet_since(self) -> float | None:
        """The time since which an answering host has had no work; None if it has some.

        A standby is prepared in such a time, because it then delays no request.
        """
        return self._idle_since if self.has_spoken and not self._work else None

    @property
    def step_deadline_s(self) -> float:
        """The time within which a host with work must take a step.

        Doubled for each host in a row that has never completed a step in time.
        """
        least_s = self._least_deadline_s * (1 << min(self._num_late, MOST_DOUBLINGS))
        return max(least_s, DEADLINE_FACTOR * self._predicted_s)

    def note_late(self) -> None:
        """Record that the host is stopped because it took no step."""
        if self._is_ready:
            self._num_late += 1

    def begin(self) -> None:
        """Watch another host."""
        self.has_spoken, self.has_computed, self._is_ready, self._last_step = False, False, False, -1
        self._idle_since = self._progress_at = self._clock()

    def end(self) -> None:
        """Record that the host is gone. Its process, if it lives, is killed without a grace period."""
        self.has_spoken = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Open a scope of work, during which the host must make progress."""
        if self._work == 0:
            self._progress_at = self._clock()
        self._work += 1
        try:
            yield
        finally:
            self._work -= 1
            self._idle_since = self._clock()

    def note_bytes(self) -> None:
        """Count the bytes of a load as progress: large models take longer than a step may."""
        self._progress_at = self._clock()

    def note_ready(self) -> None:
        """Record that the host is ready; from now on the deadline of a step applies."""
        self._is_ready, self._progress_at = True, self._clock()

    def note_step(self, step: StepOutput) -> bool:
        """Record a step; return whether the host has answered a request. Errors are no progress."""
        self.has_spoken = True
        has_answered = any(output.finish_reason not in ("error", "abort") for output in step.outputs)
        # A step without outputs computes part of a prompt.
        if has_answered or (-1 < self._last_step < step.step and not step.outputs):
            self.has_computed = True
        if has_answered or step.step != self._last_step:
            self._last_step, self._progress_at = step.step, self._clock()
        if has_answered:
            self._num_late = 0
        rates = [load.prefill_tokens_per_s for load in step.loads.values() if load.prefill_tokens_per_s]
        if rates:
            self._predicted_s = self._largest_step / min(rates)
        return has_answered

    def why_stuck(self, awake_since: float = float("-inf")) -> str | None:
        """Return why the host must be treated as dead; None if it is alive.

        This process was stopped until `awake_since`, and could not see progress before.
        """
        if not self._work:
            return None
        silent_s = self._clock() - max(self._progress_at, awake_since)
        if not self._is_ready:
            late = silent_s > self._start_timeout_s
            return f"the engine host was not ready within {self._start_timeout_s:g} s" if late else None
        deadline_s = self.step_deadline_s
        return f"the engine host has work and took no step for {deadline_s:.3g} s" if silent_s > deadline_s else None


class RestartHistory:
    """The deaths of a device's hosts, and the rules that follow from them.

    These are the pause before the next host, whether it starts without its predecessors' compiled files, and when requests are refused.
    """

    def __init__(self) -> None:
        self.num_restarts = 0
        self.last_death = ""
        self.died_at = 0.0  # time of the latest death, on `time.monotonic`'s clock
        self._deaths = 0  # hosts in a row that ended early
        self._failures = 0  # those of them that were not killed from outside
        self._crashes = 0  # hosts in a row that crashed

    @property
    def is_hopeless(self) -> bool:
        """Tell whether several hosts in a row have failed."""
        return self._failures >= HOPELESS_AFTER

    @property
    def wants_afresh(self) -> bool:
        """Tell whether the next host must delete the files that earlier hosts have built."""
        return self._crashes >= AFRESH_AFTER

    @property
    def pause_s(self) -> float:
        """The seconds until the next host is started; 0 after a first death.

        There is no pause then, because such a host usually has worked for long, and requests wait for its models.
        """
        return 0.0 if self._deaths < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._deaths - 2))

    def note_death(self, reason: str) -> None:
        self.last_death, self.died_at = reason, time.monotonic()
        self.num_restarts += 1

    def note_exit(self, *, has_crashed: bool = False, has_computed: bool = False, was_killed: bool = False) -> None:
        """Record the end of a process.

        `has_computed` is True if it had completed a step; then its successor can work, too. `was_killed` is True if it was killed from outside, which
        shows nothing about its successor.
        """
        self._crashes = self._crashes + 1 if has_crashed else 0
        if has_computed and not has_crashed:
            self._deaths = self._failures = 1
        else:
            self._deaths += 1
            self._failures += not was_killed

    def note_failure(self) -> None:
        """Record that a host could not be launched."""
        self._deaths += 1
        self._failures += 1

    def note_answer(self) -> None:
        """Record that the host works."""
        self._deaths = self._failures = self._crashes = 0

    def note_long_life(self) -> None:
        """Record that the host had been up for long when it died."""
        self._deaths = self._failures = 0


class ChangeNotifier:
    """A condition variable for one event loop, without a lock: waiting tasks check again at each notice."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()
