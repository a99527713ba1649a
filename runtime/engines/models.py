"""The site's models: which there are, where each one is, and how a request gets one that is awake.

A model wakes at start, for its first request, or shortly before that is expected; requests that come meanwhile wait for the same waking. What a
request uses stays awake somewhere. When an engine host dies, the models in use and those that stay on the device wake again, unless another device
has them as well; the others sleep. The module refuses to know HTTP and torch; who sleeps for whom is room.py's and residency.py's business, and how
one wakes is wakes.py's.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from engine.client import EngineError
from engine.protocol import ModelInfo, ModelLoad, Submit
from engine.tokenizer import Tokenizer
from runtime.admission import shutting_down
from runtime.engines.autoscaler import Autoscaler
from runtime.engines.device_budget import Condition, DeviceBudget
from runtime.engines.device_host import DeviceHost
from runtime.engines.dispatch import Dispatch
from runtime.engines.fleet import Fleet
from runtime.engines.host_memory import HostMemory
from runtime.engines.model_state import RETRY_FAILED_S, AwakeModel, ModelState, Wake
from runtime.engines.replica import Replica
from runtime.engines.wakes import Waker
from runtime.engines.weights_tier import WeightsTier
from sites.site import ModelConfig, SiteConfig
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

log = logging.getLogger("pilotlight.models")

FORESIGHT_S = 1.0  # between two looks at who is expected, and who has been idle for too long


class Models:
    def __init__(
        self,
        site: SiteConfig,
        fleet: Fleet,
        tier: WeightsTier | None = None,
        *,
        on_wake: Callable[[Wake], None] = lambda wake: None,
        on_eviction: Callable[[str, str], None] = lambda model, where: None,
        on_scaling: Callable[[str, str], None] = lambda model, direction: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is of the wall: rhythms are those of days. `on_eviction` is told the model and where it sleeps; `on_scaling`, up or down."""
        self._fleet = fleet
        self._max_waking = site.limits.max_waking
        self._states = {config.name: ModelState(config) for config in site.models}
        self._names = {name: config.name for config in site.models for name in (config.name, *config.aliases)}
        self._clock = clock
        self._changed = Condition()
        states = tuple(self._states.values())
        for state in states:
            state.replicas = tuple(Replica(state, host) for host in fleet.hosts)
        self._memory = HostMemory(states, tier, clock)
        self._budgets = tuple(
            DeviceBudget(
                [state.replicas[host.index] for state in states],
                host,
                self._memory,
                site.engine,
                self._changed,
                on_eviction,
                clock,
            )
            for host in fleet.hosts
        )
        self._waker = Waker(self._budgets, self._memory, self._changed, site.engine, on_wake)
        self.dispatch = Dispatch(states, len(fleet.hosts))
        self._autoscaler = Autoscaler(states, self._budgets, self._waker, self._changed, site.engine, on_scaling)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._patiences: set[asyncio.Timeout] = set()  # of requests that wait for a model
        self.created = int(time.time())
        self.on_forgotten: Callable[[str], None] = lambda model: None  # what it had cached is on no device any more
        for state in states:
            state.on_lost = partial(self._lost, state.config.name)
        for host in fleet.hosts:
            host.on_down, host.on_up = partial(self._forget, host), self._remember

    def resolve(self, name: str) -> str | None:
        """A model's own name, from its name or an alias."""
        return self._names.get(name)

    def has_waiting(self, name: str) -> bool:
        """Whether sequences wait for room already, wherever the model is awake."""
        state = self._states.get(self._names.get(name, ""))
        awake = state.awake if state is not None else ()
        return bool(awake) and all(replica.load.waiting > 0 for replica in awake)

    def start(self) -> None:
        """Begins to wake what is to be on the device from the start."""
        for state in self._states.values():
            if state.config.residency == "device":
                self._begin(state)
        self._tasks.append(asyncio.create_task(self._foresee(), name="foresight"))
        if len(self._fleet.hosts) > 1:
            self._tasks.append(asyncio.create_task(self._autoscaler.run(), name="autoscaler"))

    def drain(self) -> None:
        """Who waits for a model is refused at once: nothing has begun for him here, another site may have the model awake, and a wake that outlasts
        the drain would end in an error."""
        self._is_draining = True
        for patience in self._patiences:
            patience.reschedule(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        replicas = [replica for state in self._states.values() for replica in state.replicas]
        wakes_and_sleeps = [task for replica in replicas for task in (replica.task, replica.falling_asleep)]
        running = [task for task in (*wakes_and_sleeps, *self._waker.checks, *self._tasks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[AwakeModel]:
        """A request's scope: the model is awake, and stays so. Raises ApiError when it cannot be had."""
        state = self._states[name]
        state.arrivals.note(self._clock())
        loaded = await self._ready(state)
        state.users += 1
        try:
            yield loaded
        finally:
            state.users -= 1
            state.used_at = time.monotonic()
            self._changed.notify_all()

    async def place(self, submit: Submit) -> Replica:
        """The replica of a model in use that a sequence is to be computed on: at once where one lives, else as soon as one does. The caller takes
        his assignment on it (`dispatch.assigned`) before he waits for anything."""
        state = self._states[submit.model]
        while True:
            live = [replica for replica in state.awake if replica.is_live]
            if live:
                taking = [replica for replica in live if not (replica.is_retiring or replica.is_yielding)]
                return self.dispatch.choose(submit, taking or live)
            if self._fleet.is_ending:
                raise EngineError(
                    "overloaded", f"{self._fleet.why_down or 'the site is ending'}; try again in a moment"
                )
            if awake := state.awake:  # whose host has just died: who watches it will know in a moment
                await awake[0].host.until_changed()
            else:
                await self._awake(state)

    def hint(self, name: str) -> None:
        """A request is on its way: the model begins to wake if it sleeps, and there is room or somebody less expected."""
        state = self._states[name]
        if state.is_asleep and not state.is_given_up:
            state.arrivals.note(self._clock())
            self._begin(state)

    def residency(self, name: str) -> Residency:
        state = self._states[name]
        return state.residency(self._memory.holds(state))

    def missing(self) -> list[str]:
        """Why the site is not ready: one sentence for each model that should be on the device and is not."""
        return [
            f"model {state.config.name!r}: {state.detail or state.flaw or state.residency(self._memory.holds(state))}"
            for state in self._states.values()
            if state.config.residency == "device" and (not state.awake or state.flaw is not None)
        ]

    def load(self, name: str) -> ModelLoad | None:
        """How busy a model is where it is least busy; None while it is nowhere."""
        state = self._states.get(name)
        loads = [replica.load for replica in state.awake if replica.has_load] if state is not None else []
        return min(loads, key=lambda load: load.waiting_tokens, default=None)

    def kv_tokens(self, model: AwakeModel) -> int:
        """Tokens of KV cache that the model could have now: less than all while others of its host are at work."""
        found = [replica.load.total_blocks for replica in self._states[model.info.name].awake if replica.has_load]
        return (sum(found) if found else model.info.total_blocks) * model.info.block_size

    def info(self, name: str) -> ModelInfo | None:
        return self._states[name].info

    def embedding_models(self) -> list[str]:
        """Those known to make embeddings: a model that was never loaded is not known yet."""
        return [state.config.name for state in self._states.values() if state.info is not None and state.info.pooling]

    def takes_conversations(self, name: str) -> bool:
        """Once it has been loaded: whether it has a chat template."""
        text = self._states[name].text
        return text is not None and bool(text.template.sources)

    def tokenizer(self, name: str) -> Tokenizer | None:
        """The model's tokenizer, once it has been loaded."""
        text = self._states[name].text
        return text.tokenizer if text is not None else None

    @property
    def configs(self) -> list[ModelConfig]:
        return [state.config for state in self._states.values()]

    def statuses(self) -> tuple[ModelStatus, ...]:
        return tuple(state.status(self._memory.holds(state)) for state in self._states.values())

    async def _ready(self, state: ModelState) -> AwakeModel:
        """In the queue of those who wait for the model, which is bounded."""
        if not state.is_yielding and (loaded := state.loaded) is not None:
            return loaded
        if self._is_draining:
            raise shutting_down()
        if state.queued >= self._max_waking:
            expected_s = state.expected_wake_s(self._memory.holds(state))
            message = f"{state.queued} requests wait for {state.config.name!r} to wake, as many as this site lets wait; try again later"
            raise ApiError("overloaded", message, retry_after_s=max(1.0, expected_s))
        state.queued += 1
        try:
            async with self._patience():
                while state.is_yielding:
                    await self._changed.wait()
                return await self._awake(state)
        finally:
            state.queued -= 1

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """It ends when the site drains."""
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._patiences.add(patience)
                try:
                    yield
                finally:
                    self._patiences.discard(patience)
        except TimeoutError:
            if patience.expired():
                raise shutting_down() from None
            raise

    async def _awake(self, state: ModelState) -> AwakeModel:
        state.waiters += 1
        try:
            while (loaded := state.loaded) is None:
                if not state.waking:
                    is_recent = time.monotonic() - state.failed_at < RETRY_FAILED_S
                    if state.failure is not None and is_recent and not self._is_wanted_elsewhere(state):
                        raise state.failure
                    self._begin(state)
                task = state.waking[0].task
                assert task is not None
                await asyncio.shield(task)
                if state.failure is not None and not self._is_wanted_elsewhere(state):
                    raise state.failure
            return loaded
        finally:
            state.waiters -= 1

    def _is_wanted_elsewhere(self, state: ModelState) -> bool:
        """It could not be loaded for want of a host, and another device has one."""
        return state.failure is not None and state.failure.word == "overloaded" and self._fleet.why_down is None

    def _begin(self, state: ModelState, replicas: Sequence[Replica] = ()) -> None:
        """On the device that suits it best, of all or of those of the given replicas."""
        replicas = replicas or state.replicas
        if len(replicas) > 1:
            replicas = [
                state.replicas[min(self._budget_of(replica).suitability(replica) for replica in replicas).device_index]
            ]
        self._waker.begin(replicas[0])

    def _lost(self, name: str) -> None:
        self.on_forgotten(name)

    def _budget_of(self, replica: Replica) -> DeviceBudget:
        return self._budgets[replica.host.index]

    def _forget(self, host: DeviceHost, reason: str) -> None:
        """The host is gone, and with it every replica it held. Of the models that are nowhere else, those in use, and those that stay, are wanted again,
        in this order."""
        lost = [state.replicas[host.index] for state in self._states.values() if state.replicas[host.index].is_awake]
        for replica in sorted(lost, key=lambda replica: replica.state.users == 0):
            state = replica.state
            replica.lose()
            if state.awake or state.waking:
                self._budget_of(replica).give_back(replica)
            elif state.users or state.config.residency == "device":
                state.detail, state.is_cut = reason, True
                self._begin(state)
                if replica.task is None:  # it wakes elsewhere
                    self._budget_of(replica).give_back(replica)
            else:
                state.is_cut = True
                self._budget_of(replica).give_back(replica)

    def _remember(self) -> None:
        """There is a host again: what could not be loaded for want of one is wanted still."""
        for state in self._states.values():
            if state.failure is not None and state.failure.word == "overloaded" and not state.waking:
                self._begin(state)

    async def _foresee(self) -> None:
        """Wakes who is expected, and puts to sleep who has been idle for as long as the site file lets it."""
        await self._fill_host_memory()
        while True:
            await asyncio.sleep(FORESIGHT_S)
            for state in self._states.values():
                lead_s = FORESIGHT_S + 2 * state.expected_wake_s(self._memory.holds(state))
                if state.is_asleep and state.failure is None and state.arrivals.is_due(self._clock(), lead_s):
                    quiet = [
                        replica for replica in state.replicas if self._budget_of(replica).could_take_quietly(replica)
                    ]
                    if state.info is not None and quiet:
                        log.info("model %s is expected within %.1f s and wakes", state.config.name, lead_s)
                        self._begin(state, quiet)
                elif state.is_asleep and self._is_missed(state):
                    self._begin(state)
                elif self._has_idled(state):
                    await self._put_to_sleep(state)

    def _is_missed(self, state: ModelState) -> bool:
        """It belongs on the device, could not be loaded, and may be by now."""
        is_lost = state.failure is not None and state.config.residency == "device"
        return is_lost and (not state.is_given_up or self._is_wanted_elsewhere(state))

    def _has_idled(self, state: ModelState) -> bool:
        limit_s = state.config.sleep_after_s
        return (
            bool(state.awake)
            and limit_s is not None
            and not state.is_busy
            and time.monotonic() - state.used_at > limit_s
        )

    async def _put_to_sleep(self, state: ModelState) -> None:
        """On every device."""
        for replica in state.awake:
            if replica.is_awake and not replica.is_busy:  # while one fell asleep a request may have come
                await self._budget_of(replica).put_to_sleep(replica)

    async def _fill_host_memory(self) -> None:
        """What is to lie there from the start is loaded once by an engine, one after the other, and put to sleep again."""
        for state in self._states.values():
            if state.config.residency == "host" and not state.awake:
                with suppress(ApiError):  # the log has said why; a request will try again
                    await self._awake(state)
                    await self._put_to_sleep(state)
