"""The engine host of one device, whichever process that is at the moment: what others ask of it, how they wait for the next one, whether it makes
progress (I5), and how often it has died.

Its supervisor (supervisor.py) says when a host comes and goes. Refuses to know processes, text, HTTP and its siblings (fleet.py).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from weakref import WeakKeyDictionary

from pilotlight.engine.api.client import EngineClient, EngineError, ProgressCallback
from pilotlight.engine.api.protocol import HostReady, LoadProgress, ModelInfo, ModelLoad, ModelSpec, StepOutput
from pilotlight.runtime.hosts.launch import HostProcess, ProcessLauncher
from pilotlight.runtime.hosts.standby import Standby
from pilotlight.sites.site import EngineConfig

STANDBY_PREPARE_FACTOR = 5  # times start_timeout_s: it is made ready at low priority
FIRST_PAUSE_S = 0.2  # before the second restart in a row; doubled for each further host that does not live, up to:
LONGEST_PAUSE_S = 10.0
AFRESH_AFTER = 2  # hosts in a row that crashed before they had answered anything
CHARGED_WITHIN_S = 3.0  # of a host's death: what it was at work for is known when its process has ended
DEADLINE_FACTOR = 10  # times a step's predicted time: contexts grow, and a machine has other work
MOST_DOUBLINGS = 6  # of a step's deadline: 30 s become half an hour
HOPELESS_AFTER = 3  # hosts in a row that did not live: requests are then sent elsewhere instead of kept waiting

State = Literal["starting", "up", "restarting", "stopped"]


class HostHandle:
    def __init__(self, launcher: ProcessLauncher, config: EngineConfig, index: int = 0) -> None:
        """`index`: of the device among those of the site. `launcher`: of its standby hosts."""
        self.index = index
        self.device = config.all_devices[index]
        self.own_role = config.roles[index]
        self.role = self.own_role  # for as long as the load is as it is (roles.py)
        self.progress = ProgressWatch(config.start_timeout_s, config.step_deadline_s, config.max_num_batched_tokens)
        self.restarts = RestartHistory()
        self.standby = Standby(
            launcher,
            config.standby,
            lambda: self.progress.quiet_since if self.state == "up" else None,
            quiet_s=config.standby_after_s,
            prepare_within_s=STANDBY_PREPARE_FACTOR * config.start_timeout_s,
        )
        self.state: State = "starting"
        self.reason = "the engine host is starting"  # why the state is not "up"
        self.ready: HostReady | None = None  # what the newest host to say so said of itself; the device stays the same
        self.running: HostProcess | None = None
        self._charged: WeakKeyDictionary[EngineClient, frozenset[str]] = WeakKeyDictionary()  # of hosts that are dead
        self._ended: str | None = None  # why nothing open is waited for any longer
        self.changed = ChangeNotifier()  # a host has come or gone, or none is waited for any longer
        self._step_observers: list[Callable[[StepOutput], None]] = []
        self._change_observers: list[tuple[Callable[[], None], Callable[[HostHandle, str], None]]] = []

    @property
    def client(self) -> EngineClient | None:
        """The host's client, while there is a host."""
        return self.running.client if self.running is not None else None

    @property
    def peer_address(self) -> str | None:
        """Where the host serves its KV blocks to the site's other hosts; None: it serves none, or there is no host."""
        return self.running.peer_address if self.running is not None else None

    @property
    def why_down(self) -> str | None:
        """None while there is a host that answers.

        A closed socket tells of a death before the process's exit is seen."""
        if self.state != "up" or self.running is None:
            return self.reason
        return self.running.client.death

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """The newest of every model it holds, by name."""
        return self.running.client.loads if self.running is not None else {}

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Call back for every frame of every host there will be."""
        self._step_observers.append(callback)

    def on_change(self, up: Callable[[], None], down: "Callable[[HostHandle, str], None]") -> None:
        """Call back whenever a host has come, or has gone for this reason."""
        self._change_observers.append((up, down))

    def serving_client(self) -> EngineClient:
        """Return the present host's client. Raises EngineError while there is no host that answers."""
        client = self.client
        if client is None or client.death is not None:
            raise EngineError("overloaded", f"{self.why_down}; try again in a moment")
        return client

    async def next_client(self, after: EngineClient | None = None) -> EngineClient:
        """Wait for a host whose client is not `after`.

        Raises EngineError when host after host does not live, or the site waits for none."""
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

    async def charged(self, client: EngineClient) -> frozenset[str]:
        """Return the sequences in whose step a host has ended by itself, once that is known; none where it was killed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHARGED_WITHIN_S):
                while client not in self._charged:
                    await self.changed.wait()
        return self._charged.get(client, frozenset())

    async def until_ready(self) -> None:
        """Return once a host has said what it found."""
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
        self.standby.expect(spec)
        return info

    async def unload_model(self, name: str) -> None:
        """Unload a model from the present host."""
        client = self.client
        if client is None:
            raise EngineError("engine_error", self.reason)
        with self.progress.expected():
            await client.unload_model(name)

    def end(self, reason: str) -> None:
        """End every open sequence with an error: the site will not wait for them any longer."""
        self.stop_waiting(reason)
        if self.client is not None:
            self.client.fail(reason)

    def stop_waiting(self, reason: str) -> None:
        """Note that no further host comes."""
        self._ended = reason
        self.changed.notify_all()

    def set_up(self, host: HostProcess) -> None:
        """Take the host that the supervisor has started."""
        self.progress.begin()
        host.client.on_step(self._note_step)
        self.running = host
        self.state, self.reason = "up", ""
        self.changed.notify_all()
        for up, _ in self._change_observers:
            up()

    def set_down(self, reason: str) -> None:
        """Note that the host is gone, or is treated as if it were."""
        self.running = None
        self.progress.end()
        self.state, self.reason = "restarting", reason
        self.restarts.note_death(reason)
        self.changed.notify_all()
        for _, down in self._change_observers:
            down(self, reason)

    def note_charged(self, client: EngineClient, sequences: Iterable[str]) -> None:
        """Note under which sequences a host has ended."""
        self._charged[client] = frozenset(sequences)
        self.changed.notify_all()

    def forget_host(self) -> None:
        """Give out the host no more: its process is being stopped."""
        self.running = None

    def set_stopped(self, reason: str) -> None:
        self.state, self.reason = "stopped", reason

    def _note_step(self, step: StepOutput) -> None:
        if self.progress.note_step(step):
            self.restarts.note_answer()
        for observer in self._step_observers:
            observer(step)


class ProgressWatch:
    """Whether a host that has work takes steps inside its deadline, or, before it is ready, becomes so: liveness is token progress."""

    def __init__(self, start_timeout_s: float, step_deadline_s: float, largest_step: int = 0) -> None:
        """`step_deadline_s`: of a step, at least: more where this machine takes longer for one of `largest_step` tokens."""
        self._start_timeout_s = start_timeout_s
        self._least_deadline_s = step_deadline_s
        self._largest_step = largest_step
        self._predicted_s = 0.0  # by the slowest model's measured rate, for the largest step
        self._num_late = 0  # hosts in a row that were late before any step of theirs had ended
        self.has_spoken = False  # the present host has sent something
        self._is_ready = False  # and could load a model: before, it imports, and its heart beats
        self._work = 0  # sequences and loads under way
        self._progress_at = 0.0
        self._last_step = -1
        self._idle_since = time.monotonic()

    @property
    def has_work(self) -> bool:
        return self._work > 0

    @property
    def quiet_since(self) -> float | None:
        """Since when the host has answered and had no work: the time at which making a standby costs no request anything."""
        return self._idle_since if self.has_spoken and not self._work else None

    @property
    def step_deadline_s(self) -> float:
        """The time in which a host that has work has to take a step.

        Where no step ever ended inside it, nothing is measured: it is doubled."""
        least_s = self._least_deadline_s * (1 << min(self._num_late, MOST_DOUBLINGS))
        return max(least_s, DEADLINE_FACTOR * self._predicted_s)

    def note_late(self) -> None:
        """Note that the host is ended for want of a step."""
        if self._is_ready:
            self._num_late += 1

    def begin(self) -> None:
        """Watch another host."""
        self.has_spoken, self._is_ready, self._last_step = False, False, -1
        self._idle_since = self._progress_at = time.monotonic()

    def end(self) -> None:
        """Note that the host is gone: it is not asked politely to end, since its process has ended or hangs."""
        self.has_spoken = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Open a scope of work: the host must make progress meanwhile."""
        if self._work == 0:
            self._progress_at = time.monotonic()
        self._work += 1
        try:
            yield
        finally:
            self._work -= 1
            self._idle_since = time.monotonic()

    def note_bytes(self) -> None:
        """Bytes of a load are progress too: large models take longer than a step may."""
        self._progress_at = time.monotonic()

    def note_ready(self) -> None:
        """Note that the host has made itself ready: from here it has a step's time."""
        self._is_ready, self._progress_at = True, time.monotonic()

    def note_step(self, step: StepOutput) -> bool:
        """Return whether the host has answered a request: errors are no progress."""
        self.has_spoken = True
        has_answered = any(output.finish_reason not in ("error", "abort") for output in step.outputs)
        if has_answered or step.step != self._last_step:
            self._last_step, self._progress_at = step.step, time.monotonic()
        if has_answered:
            self._num_late = 0
        rates = [load.prefill_tokens_per_s for load in step.loads.values() if load.prefill_tokens_per_s]
        if rates:
            self._predicted_s = self._largest_step / min(rates)
        return has_answered

    def why_stuck(self) -> str | None:
        """Return why the host has to be treated as dead; None while it has not."""
        if not self._work:
            return None
        silent_s = time.monotonic() - self._progress_at
        if not self._is_ready:
            late = silent_s > self._start_timeout_s
            return f"the engine host was not ready within {self._start_timeout_s:g} s" if late else None
        deadline_s = self.step_deadline_s
        return f"the engine host has work and took no step for {deadline_s:.3g} s" if silent_s > deadline_s else None


class RestartHistory:
    """How often the host has died, and what follows: the pause before the next, whether that removes what hosts have built, whether there is hope."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self.last_death = ""
        self._failures = 0  # hosts in a row that did not live
        self._crashes = 0  # those of them that crashed

    @property
    def is_hopeless(self) -> bool:
        """Whether host after host does not live."""
        return self._failures >= HOPELESS_AFTER

    @property
    def wants_afresh(self) -> bool:
        """Whether the next host is to remove what hosts before it have built."""
        return self._crashes >= AFRESH_AFTER

    @property
    def pause_s(self) -> float:
        """The pause before the next host: none after a first death, since most hosts that die have lived well, and their models are missed."""
        return 0.0 if self._failures < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 2))

    def note_death(self, reason: str) -> None:
        self.last_death = reason
        self._failures += 1

    def note_exit(self, has_crashed: bool) -> None:
        self._crashes = self._crashes + 1 if has_crashed else 0

    def note_answer(self) -> None:
        """Note that the host lives."""
        self._failures = self._crashes = 0

    def note_long_life(self) -> None:
        """Note that the host had been up for long when it died."""
        self._failures = 0


class ChangeNotifier:
    """A condition variable for one event loop: tasks that wait for something to change look again at each notice. Unlike asyncio's own it has no
    lock."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()
