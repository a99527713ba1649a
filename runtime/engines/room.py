"""Room for weights on one device: who holds it, who is put to sleep for whom, in which order the waking get it.

Decisions are residency.py's; this carries them out. One model at a time is given room, first come first served: nothing overtakes a large model for
ever. Whoever is in use is waited for; after a while the ones in the way take no new requests until the waiting model has had its turn.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from engine.client import EngineClient, EngineError
from runtime.engines.copies import Copy
from runtime.engines.host_memory import HostMemory
from runtime.engines.hosts import DeviceHost
from runtime.engines.memory import GIB, gib
from runtime.engines.residency import Standing, could_ever_fit, make_room, must_yield
from sites.site import EngineConfig

log = logging.getLogger("pilotlight.models")

YIELD_AFTER_S = 2.0  # a waking model has waited so long for those in its way; then they take no new requests
_WORKSPACE = 0.1  # of a CUDA device's free memory, for activations and libraries


class News:
    """A request has ended, or a model, on whichever device: whoever waits for room, or to be taken, looks again."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()


class Suitability(NamedTuple):
    """How good a place for one more model a device is: the least is the best."""

    delay: int  # 0: its host is up, 1: soon, 2: who knows
    crowding: int  # 0: there is room, 1: others sleep for it, 2: others are waited for
    num_bytes: int  # of the others' weights
    num_models: int
    device_index: int


class Room:
    def __init__(
        self,
        copies: Iterable[Copy],
        host: DeviceHost,
        memory: HostMemory,
        config: EngineConfig,
        news: News,
        on_eviction: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._copies = {copy.slot.config.name: copy for copy in copies}
        self._host = host
        self._memory = memory
        self._config = config
        self._news = news
        self._on_eviction = on_eviction
        self._clock = clock
        self._turn = asyncio.Lock()  # fair: whoever asks first is served first

    async def take(self, copy: Copy) -> bool:
        """Returns when the copy has room, true if others were put to sleep for it. Raises EngineError when it never can have."""
        if copy.holds_room:
            return False
        needed = copy.slot.num_bytes
        async with self._turn:
            began = time.monotonic()
            try:
                while True:
                    budget, held = self.budget(), self._standings()
                    plan = make_room(needed, budget, held)
                    if plan.is_possible:
                        break
                    assert budget is not None, "without a budget there is always room"
                    if not could_ever_fit(needed, budget, held):
                        raise EngineError("model_load_failed", self._never(copy, budget))
                    copy.slot.detail = "waiting for room on the device"
                    waited_s = time.monotonic() - began
                    if waited_s >= YIELD_AFTER_S:
                        self._make_yield(must_yield(needed, budget, held))
                    patience = [YIELD_AFTER_S - waited_s] if waited_s < YIELD_AFTER_S else []
                    patience += [] if plan.wait_s is None else [plan.wait_s]
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), min(patience) + 0.001 if patience else None)
                copy.holds_room = True
                # All at once, before anybody else has a turn to use one of them.
                asleep = [self._lay_down(self._copies[name]) for name in plan.evict]
                await asyncio.gather(*map(asyncio.shield, asleep))
                return bool(plan.evict)
            finally:
                self._make_yield(())

    def give_back(self, copy: Copy) -> None:
        copy.holds_room = False
        self._news.tell()

    def suitability(self, copy: Copy) -> Suitability:
        """Of this device for the copy that would wake here."""
        others = [other for other in self._copies.values() if other.holds_room or other.task is not None]
        others = [other for other in others if other is not copy]
        plan = make_room(copy.slot.num_bytes, self.budget(), [self._standing(other) for other in others])
        crowding = 2 if self._turn.locked() or not plan.is_possible else 1 if plan.evict else 0
        crowding = 0 if copy.holds_room else crowding
        is_soon = not self._host.is_hopeless and self._host.standby.state == "ready"
        delay = 0 if self._host.why_down is None or is_soon else 2 if self._host.is_hopeless else 1
        held = sum(other.slot.num_bytes for other in others)
        return Suitability(delay, crowding, held, len(others), self._host.index)

    def could_take_quietly(self, copy: Copy) -> bool:
        """For a model that nobody has asked for: nobody may be put to sleep who is expected as soon."""
        if self._turn.locked():
            return False
        plan = make_room(copy.slot.num_bytes, self.budget(), self._standings())
        now = self._clock()
        mine = copy.slot.arrivals.expected_in_s(now)
        others = [self._copies[name].slot.arrivals for name in plan.evict]
        return plan.is_possible and all(other.expected_in_s(now) > 2 * mine for other in others)

    async def put_to_sleep(self, copy: Copy) -> None:
        """Its weights stay in host memory where they have a place there. The caller has made sure that nobody uses it."""
        await asyncio.shield(self._lay_down(copy))

    def _lay_down(self, copy: Copy) -> "asyncio.Task[None]":
        """From this moment on nobody gets it."""
        assert copy.is_awake
        assert not copy.work.sequences, "a copy with open sequences is never put to sleep"
        assert copy.is_spare or not copy.slot.users, "a model with open requests is never put to sleep"
        copy.lose()
        copy.slot.detail, copy.slot.evictions = "", copy.slot.evictions + 1
        unloading = self._unload(copy, self._host.client)
        copy.falling_asleep = asyncio.create_task(unloading, name=f"unload {copy.slot.config.name}")
        return copy.falling_asleep

    async def _unload(self, copy: Copy, client: EngineClient | None) -> None:
        name = copy.slot.config.name
        try:
            if client is not None and client is self._host.client:
                with suppress(EngineError):  # the host died, and the model with it
                    await self._host.unload_model(name)
            where = "host" if self._memory.holds(copy.slot) else "disk"
            log.info("model %s sleeps (%s)", name, where)
            self._on_eviction(name, where)
        finally:  # whoever wakes it again waits for this first
            copy.falling_asleep = None
            self.give_back(copy)

    def budget(self) -> int | None:
        """Bytes of weights that may be awake; None: whatever fits."""
        if self._config.weights_gib is not None:
            return round(self._config.weights_gib * GIB)
        ready = self._host.ready
        if ready is None or ready.device_bytes is None:
            return None
        return max(0, int(ready.device_bytes * (1 - _WORKSPACE) - self._config.kv_gib * GIB))

    def _standings(self) -> list[Standing]:
        return [self._standing(copy) for copy in self._copies.values() if copy.holds_room]

    def _standing(self, copy: Copy) -> Standing:
        return copy.standing(time.monotonic(), self._clock(), self._memory.holds(copy.slot))

    def _make_yield(self, names: tuple[str, ...]) -> None:
        for name, copy in self._copies.items():
            copy.is_yielding = name in names
        if not names:
            self._news.tell()

    def _never(self, copy: Copy, budget: int) -> str:
        others = [other.slot for other in self._copies.values() if other.holds_room]
        pinned = {slot.config.name: slot.num_bytes for slot in others if slot.config.residency == "device"}
        taken = "".join(f" and {name}, which stays, {gib(size)}" for name, size in pinned.items())
        return (
            f"{copy.slot.config.name} needs {gib(copy.slot.num_bytes)} of the device{taken}, and there are {gib(budget)} for weights: "
            "raise weights_gib, lower kv_gib, or let other models be auto"
        )
