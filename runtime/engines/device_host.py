"""The engine host of one device, whichever process that is at the moment: what others ask of it, and how they wait for the next one.

Its supervisor (supervisor.py) says when a host comes and goes. Refuses to know processes, text, HTTP and its siblings (fleet.py).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from engine.client import EngineClient, EngineError, ProgressCallback
from engine.protocol import HostReady, ModelInfo, ModelLoad, ModelSpec, StepOutput
from runtime.engines.condition import Condition
from runtime.engines.progress import ProgressWatch
from runtime.engines.restarts import RestartHistory
from runtime.engines.running_host import Launcher, RunningHost
from runtime.engines.standby import Standby
from sites.site import EngineConfig

STANDBY_PREPARE_FACTOR = 5  # times start_timeout_s: it is made ready at low priority

State = Literal["starting", "up", "restarting", "stopped"]


class DeviceHost:
    def __init__(self, launcher: Launcher, config: EngineConfig, index: int = 0) -> None:
        """`index`: of the device among those of the site. `launcher`: of its standby hosts."""
        self.index = index
        self.device = config.all_devices[index]
        self.progress = ProgressWatch(config.start_timeout_s, config.step_deadline_s)
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
        self.on_down: Callable[[str], None] = lambda reason: None
        self.on_up: Callable[[], None] = lambda: None
        self._host: RunningHost | None = None
        self._ended: str | None = None  # why nothing open is waited for any longer
        self._changed = Condition()  # a host has come or gone, or none is waited for any longer
        self._step_observers: list[Callable[[StepOutput], None]] = []

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

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Call back for every frame of every host there will be."""
        self._step_observers.append(callback)

    def serving_client(self) -> EngineClient:
        """Return the present host's client. Raises EngineError while there is no host that answers."""
        client = self.client
        if client is None or client.death is not None:
            raise EngineError("overloaded", f"{self.why_down}; try again in a moment")
        return client

    async def next_client(self, after: EngineClient | None = None) -> EngineClient:
        """Wait for a host whose client is not `after`. Raises EngineError when host after host does not live, or the site waits for none."""
        while True:
            if self._ended is not None:
                raise EngineError("engine_error", self._ended)
            client = self.client
            if client is not None and client is not after:
                return client
            if self.restarts.is_hopeless:
                message = f"this site's engine host does not start ({self.restarts.last_death}); try another site"
                raise EngineError("overloaded", message)
            await self._changed.wait()

    async def until_changed(self) -> None:
        """Return when a host comes or goes, or nothing is waited for any longer."""
        await self._changed.wait()

    async def until_ready(self) -> None:
        """Return once a host has said what it found."""
        while self.ready is None:
            client = await self.next_client()
            with suppress(EngineError):
                self.ready = await client.hello()
                return
            await self.next_client(after=client)

    async def load_model(self, client: EngineClient, spec: ModelSpec, on_progress: ProgressCallback) -> ModelInfo:
        def note(done: int, total: int) -> None:
            self.progress.note_bytes()
            on_progress(done, total)

        with self.progress.expected():
            return await client.load_model(spec, note)

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
        self._changed.notify_all()

    def set_up(self, host: RunningHost) -> None:
        """Take the host that the supervisor has started."""
        self.progress.begin()
        host.client.on_step(self._note_step)
        self._host = host
        self.state, self.reason = "up", ""
        self._changed.notify_all()
        self.on_up()

    def set_down(self, reason: str) -> None:
        """Note that the host is gone, or is treated as if it were."""
        self._host = None
        self.progress.end()
        self.state, self.reason = "restarting", reason
        self.restarts.note_death(reason)
        self._changed.notify_all()
        self.on_down(reason)

    def forget_host(self) -> None:
        """Give out the host no more: its process is being stopped."""
        self._host = None

    def set_stopped(self, reason: str) -> None:
        self.state, self.reason = "stopped", reason

    def _note_step(self, step: StepOutput) -> None:
        if self.progress.note_step(step):
            self.restarts.note_answer()
        for observer in self._step_observers:
            observer(step)
