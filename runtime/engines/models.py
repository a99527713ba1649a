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
from runtime.engines.copies import Copy
from runtime.engines.dispatch import Dispatch
from runtime.engines.fleet import Fleet
from runtime.engines.host_memory import HostMemory
from runtime.engines.hosts import DeviceHost
from runtime.engines.room import News, Room
from runtime.engines.slot import RETRY_FAILED_S, LoadedModel, Slot, Wake
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
        self._slots = {config.name: Slot(config) for config in site.models}
        self._names = {name: config.name for config in site.models for name in (config.name, *config.aliases)}
        self._clock = clock
        self._news = News()
        slots = tuple(self._slots.values())
        for slot in slots:
            slot.copies = tuple(Copy(slot, host) for host in fleet.hosts)
        self._memory = HostMemory(slots, tier, clock)
        self._rooms = tuple(
            Room(
                [slot.copies[host.index] for slot in slots],
                host,
                self._memory,
                site.engine,
                self._news,
                on_eviction,
                clock,
            )
            for host in fleet.hosts
        )
        self._waker = Waker(self._rooms, self._memory, self._news, site.engine, on_wake)
        self.dispatch = Dispatch(slots, len(fleet.hosts))
        self._autoscaler = Autoscaler(slots, self._rooms, self._waker, self._news, site.engine, on_scaling)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._patiences: set[asyncio.Timeout] = set()  # of requests that wait for a model
        self.created = int(time.time())
        self.on_forgotten: Callable[[str], None] = lambda model: None  # what it had cached is on no device any more
        for slot in slots:
            slot.on_lost = partial(self._lost, slot.config.name)
        for host in fleet.hosts:
            host.on_down, host.on_up = partial(self._forget, host), self._remember

    def resolve(self, name: str) -> str | None:
        """A model's own name, from its name or an alias."""
        return self._names.get(name)

    def has_waiting(self, name: str) -> bool:
        """Whether sequences wait for room already, wherever the model is awake."""
        slot = self._slots.get(self._names.get(name, ""))
        awake = slot.awake if slot is not None else ()
        return bool(awake) and all(copy.load.waiting > 0 for copy in awake)

    def start(self) -> None:
        """Begins to wake what is to be on the device from the start."""
        for slot in self._slots.values():
            if slot.config.residency == "device":
                self._begin(slot)
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
        copies = [copy for slot in self._slots.values() for copy in slot.copies]
        wakes_and_sleeps = [task for copy in copies for task in (copy.task, copy.falling_asleep)]
        running = [task for task in (*wakes_and_sleeps, *self._waker.checks, *self._tasks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LoadedModel]:
        """A request's scope: the model is awake, and stays so. Raises ApiError when it cannot be had."""
        slot = self._slots[name]
        slot.arrivals.note(self._clock())
        loaded = await self._ready(slot)
        slot.users += 1
        try:
            yield loaded
        finally:
            slot.users -= 1
            slot.used_at = time.monotonic()
            self._news.tell()

    async def place(self, submit: Submit) -> Copy:
        """The copy of a model in use that a sequence is to be computed on: at once where one lives, else as soon as one does. The caller takes
        his seat on it (`dispatch.seated`) before he waits for anything."""
        slot = self._slots[submit.model]
        while True:
            live = [copy for copy in slot.awake if copy.is_live]
            if live:
                taking = [copy for copy in live if not (copy.is_retiring or copy.is_yielding)]
                return self.dispatch.choose(submit, taking or live)
            if self._fleet.is_ending:
                raise EngineError(
                    "overloaded", f"{self._fleet.why_down or 'the site is ending'}; try again in a moment"
                )
            if awake := slot.awake:  # whose host has just died: who watches it will know in a moment
                await awake[0].host.until_changed()
            else:
                await self._awake(slot)

    def hint(self, name: str) -> None:
        """A request is on its way: the model begins to wake if it sleeps, and there is room or somebody less expected."""
        slot = self._slots[name]
        if slot.is_asleep and not slot.is_given_up:
            slot.arrivals.note(self._clock())
            self._begin(slot)

    def residency(self, name: str) -> Residency:
        slot = self._slots[name]
        return slot.residency(self._memory.holds(slot))

    def missing(self) -> list[str]:
        """Why the site is not ready: one sentence for each model that should be on the device and is not."""
        return [
            f"model {slot.config.name!r}: {slot.detail or slot.flaw or slot.residency(self._memory.holds(slot))}"
            for slot in self._slots.values()
            if slot.config.residency == "device" and (not slot.awake or slot.flaw is not None)
        ]

    def load(self, name: str) -> ModelLoad | None:
        """How busy a model is where it is least busy; None while it is nowhere."""
        slot = self._slots.get(name)
        loads = [copy.load for copy in slot.awake if copy.has_load] if slot is not None else []
        return min(loads, key=lambda load: load.waiting_tokens, default=None)

    def kv_tokens(self, model: LoadedModel) -> int:
        """Tokens of KV cache that the model could have now: less than all while others of its host are at work."""
        found = [copy.load.total_blocks for copy in self._slots[model.info.name].awake if copy.has_load]
        return (sum(found) if found else model.info.total_blocks) * model.info.block_size

    def info(self, name: str) -> ModelInfo | None:
        return self._slots[name].info

    def embedding_models(self) -> list[str]:
        """Those known to make embeddings: a model that was never loaded is not known yet."""
        return [slot.config.name for slot in self._slots.values() if slot.info is not None and slot.info.pooling]

    def takes_conversations(self, name: str) -> bool:
        """Once it has been loaded: whether it has a chat template."""
        text = self._slots[name].text
        return text is not None and bool(text.template.sources)

    def tokenizer(self, name: str) -> Tokenizer | None:
        """The model's tokenizer, once it has been loaded."""
        text = self._slots[name].text
        return text.tokenizer if text is not None else None

    @property
    def configs(self) -> list[ModelConfig]:
        return [slot.config for slot in self._slots.values()]

    def statuses(self) -> tuple[ModelStatus, ...]:
        return tuple(slot.status(self._memory.holds(slot)) for slot in self._slots.values())

    async def _ready(self, slot: Slot) -> LoadedModel:
        """In the queue of those who wait for the model, which is bounded."""
        if not slot.is_yielding and (loaded := slot.loaded) is not None:
            return loaded
        if self._is_draining:
            raise shutting_down()
        if slot.queued >= self._max_waking:
            expected_s = slot.expected_wake_s(self._memory.holds(slot))
            message = f"{slot.queued} requests wait for {slot.config.name!r} to wake, as many as this site lets wait; try again later"
            raise ApiError("overloaded", message, retry_after_s=max(1.0, expected_s))
        slot.queued += 1
        try:
            async with self._patience():
                while slot.is_yielding:
                    await self._news.wait()
                return await self._awake(slot)
        finally:
            slot.queued -= 1

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

    async def _awake(self, slot: Slot) -> LoadedModel:
        slot.waiters += 1
        try:
            while (loaded := slot.loaded) is None:
                if not slot.waking:
                    is_recent = time.monotonic() - slot.failed_at < RETRY_FAILED_S
                    if slot.failure is not None and is_recent and not self._is_wanted_elsewhere(slot):
                        raise slot.failure
                    self._begin(slot)
                task = slot.waking[0].task
                assert task is not None
                await asyncio.shield(task)
                if slot.failure is not None and not self._is_wanted_elsewhere(slot):
                    raise slot.failure
            return loaded
        finally:
            slot.waiters -= 1

    def _is_wanted_elsewhere(self, slot: Slot) -> bool:
        """It could not be loaded for want of a host, and another device has one."""
        return slot.failure is not None and slot.failure.word == "overloaded" and self._fleet.why_down is None

    def _begin(self, slot: Slot, copies: Sequence[Copy] = ()) -> None:
        """On the device that suits it best, of all or of those of the given copies."""
        copies = copies or slot.copies
        if len(copies) > 1:
            copies = [slot.copies[min(self._room_of(copy).suitability(copy) for copy in copies).device_index]]
        self._waker.begin(copies[0])

    def _lost(self, name: str) -> None:
        self.on_forgotten(name)

    def _room_of(self, copy: Copy) -> Room:
        return self._rooms[copy.host.index]

    def _forget(self, host: DeviceHost, reason: str) -> None:
        """The host is gone, and with it every copy it held. Of the models that are nowhere else, those in use, and those that stay, are wanted again,
        in this order."""
        lost = [slot.copies[host.index] for slot in self._slots.values() if slot.copies[host.index].is_awake]
        for copy in sorted(lost, key=lambda copy: copy.slot.users == 0):
            slot = copy.slot
            copy.lose()
            if slot.awake or slot.waking:
                self._room_of(copy).give_back(copy)
            elif slot.users or slot.config.residency == "device":
                slot.detail, slot.is_cut = reason, True
                self._begin(slot)
                if copy.task is None:  # it wakes elsewhere
                    self._room_of(copy).give_back(copy)
            else:
                slot.is_cut = True
                self._room_of(copy).give_back(copy)

    def _remember(self) -> None:
        """There is a host again: what could not be loaded for want of one is wanted still."""
        for slot in self._slots.values():
            if slot.failure is not None and slot.failure.word == "overloaded" and not slot.waking:
                self._begin(slot)

    async def _foresee(self) -> None:
        """Wakes who is expected, and puts to sleep who has been idle for as long as the site file lets it."""
        await self._fill_host_memory()
        while True:
            await asyncio.sleep(FORESIGHT_S)
            for slot in self._slots.values():
                lead_s = FORESIGHT_S + 2 * slot.expected_wake_s(self._memory.holds(slot))
                if slot.is_asleep and slot.failure is None and slot.arrivals.is_due(self._clock(), lead_s):
                    quiet = [copy for copy in slot.copies if self._room_of(copy).could_take_quietly(copy)]
                    if slot.info is not None and quiet:
                        log.info("model %s is expected within %.1f s and wakes", slot.config.name, lead_s)
                        self._begin(slot, quiet)
                elif slot.is_asleep and self._is_missed(slot):
                    self._begin(slot)
                elif self._has_idled(slot):
                    await self._put_to_sleep(slot)

    def _is_missed(self, slot: Slot) -> bool:
        """It belongs on the device, could not be loaded, and may be by now."""
        is_lost = slot.failure is not None and slot.config.residency == "device"
        return is_lost and (not slot.is_given_up or self._is_wanted_elsewhere(slot))

    def _has_idled(self, slot: Slot) -> bool:
        limit_s = slot.config.sleep_after_s
        return (
            bool(slot.awake) and limit_s is not None and not slot.is_busy and time.monotonic() - slot.used_at > limit_s
        )

    async def _put_to_sleep(self, slot: Slot) -> None:
        """On every device."""
        for copy in slot.awake:
            if copy.is_awake and not copy.is_busy:  # while one fell asleep a request may have come
                await self._room_of(copy).put_to_sleep(copy)

    async def _fill_host_memory(self) -> None:
        """What is to lie there from the start is loaded once by an engine, one after the other, and put to sleep again."""
        for slot in self._slots.values():
            if slot.config.residency == "host" and not slot.awake:
                with suppress(ApiError):  # the log has said why; a request will try again
                    await self._awake(slot)
                    await self._put_to_sleep(slot)
