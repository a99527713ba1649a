"""Room for weights on the device: who holds it, who is put to sleep for whom, in which order the waking get it.

Decisions are residency.py's; this carries them out. One model at a time is given room, first come first served: nothing overtakes a large model for
ever. Whoever is in use is waited for; after a while the ones in the way take no new requests until the waiting model has had its turn.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from engine.client import EngineClient, EngineError
from runtime.engines.hosts import EngineHosts
from runtime.engines.memory import GIB, gib
from runtime.engines.residency import Standing, could_ever_fit, make_room, must_yield
from runtime.engines.slot import Slot
from runtime.engines.weights_tier import WeightsTier
from sites.config import EngineConfig

log = logging.getLogger("pilotlight.models")

YIELD_AFTER_S = 2.0  # a waking model has waited so long for those in its way; then they take no new requests
_WORKSPACE = 0.1  # of a CUDA device's free memory, for activations and libraries


class Room:
    def __init__(
        self,
        slots: Iterable[Slot],
        hosts: EngineHosts,
        tier: WeightsTier | None,
        config: EngineConfig,
        on_eviction: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._slots = {slot.config.name: slot for slot in slots}
        self._hosts = hosts
        self._tier = tier
        self._config = config
        self._on_eviction = on_eviction
        self._clock = clock
        self._turn = asyncio.Lock()  # fair: whoever asks first is served first
        self._changed = asyncio.Event()

    def is_in_memory(self, slot: Slot) -> bool:
        return self._tier is not None and self._tier.bytes_of(slot.config.name) > 0

    def notify(self) -> None:
        """A request has ended, or a model: whoever waits for room looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_changed(self) -> None:
        await self._changed.wait()

    async def take(self, slot: Slot) -> bool:
        """Returns when the slot has room, true if others were put to sleep for it. Raises EngineError when it never can have."""
        if slot.holds_room:
            return False
        async with self._turn:
            began = time.monotonic()
            try:
                while True:
                    budget, held = self.budget(), self._standings()
                    plan = make_room(slot.num_bytes, budget, held)
                    if plan.is_possible:
                        break
                    assert budget is not None, "without a budget there is always room"
                    if not could_ever_fit(slot.num_bytes, budget, held):
                        raise EngineError("model_load_failed", self._never(slot, budget))
                    slot.detail = "waiting for room on the device"
                    waited_s = time.monotonic() - began
                    if waited_s >= YIELD_AFTER_S:
                        self._make_yield(must_yield(slot.num_bytes, budget, held))
                    patience = [YIELD_AFTER_S - waited_s] if waited_s < YIELD_AFTER_S else []
                    patience += [] if plan.wait_s is None else [plan.wait_s]
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(patience) + 0.001 if patience else None)
                slot.holds_room = True
                await asyncio.gather(*(self.put_to_sleep(self._slots[name]) for name in plan.evict))
                return bool(plan.evict)
            finally:
                self._make_yield(())

    def give_back(self, slot: Slot) -> None:
        slot.holds_room = False
        self.notify()

    def could_take_quietly(self, slot: Slot) -> bool:
        """For a model that nobody has asked for: nobody may be put to sleep who is expected as soon."""
        if self._turn.locked():
            return False
        plan = make_room(slot.num_bytes, self.budget(), self._standings())
        now = self._clock()
        mine = slot.arrivals.expected_in_s(now)
        return plan.is_possible and all(self._slots[name].arrivals.expected_in_s(now) > 2 * mine for name in plan.evict)

    async def put_to_sleep(self, slot: Slot) -> None:
        """Its weights stay in host memory where they have a place there. The caller has made sure that nobody uses it."""
        assert slot.loaded is not None
        assert not slot.users, "a model with open requests is never put to sleep"
        slot.loaded, slot.detail, slot.evictions = None, "", slot.evictions + 1
        client = self._hosts.client
        slot.falling_asleep = asyncio.create_task(self._unload(slot, client), name=f"unload {slot.config.name}")
        await asyncio.shield(slot.falling_asleep)

    async def _unload(self, slot: Slot, client: EngineClient | None) -> None:
        try:
            if client is not None and client is self._hosts.client:
                with suppress(EngineError):  # the host died, and the model with it
                    await self._hosts.unload_model(slot.config.name)
            where = "host" if self.is_in_memory(slot) else "disk"
            log.info("model %s sleeps (%s)", slot.config.name, where)
            self._on_eviction(slot.config.name, where)
        finally:  # whoever wakes it again waits for this first
            slot.falling_asleep = None
            self.give_back(slot)

    def file_for(self, slot: Slot) -> str | None:
        """Where its weights may lie in host memory; sleeping models' files give way. None: it has no place there."""
        tier, name = self._tier, slot.config.name
        if tier is None or slot.config.residency == "disk":
            return None
        others = [other for other in self._slots.values() if other is not slot]
        now = self._clock()
        held = [other.standing_in_memory(now, size) for other in others if (size := tier.held_for(other.config.name))]
        plan = make_room(max(slot.num_bytes, tier.held_for(name)), tier.limit_bytes, held)
        if not plan.is_possible:
            log.info(
                "%s has no place among the weights in host memory (%s of %s are in use)",
                name, gib(sum(each.num_bytes for each in held)), gib(tier.limit_bytes),
            )  # fmt: skip
            return None
        for victim in plan.evict:
            log.info("%s leaves host memory for %s", victim, name)
            tier.remove(victim)
        return str(tier.file_of(name))

    def budget(self) -> int | None:
        """Bytes of weights that may be awake; None: whatever fits."""
        if self._config.weights_gib is not None:
            return round(self._config.weights_gib * GIB)
        ready = self._hosts.ready
        if ready is None or ready.device_bytes is None:
            return None
        return max(0, int(ready.device_bytes * (1 - _WORKSPACE) - self._config.kv_gib * GIB))

    def _standings(self) -> list[Standing]:
        now, monotonic = self._clock(), time.monotonic()
        return [
            slot.standing(monotonic, now, self.is_in_memory(slot)) for slot in self._slots.values() if slot.holds_room
        ]

    def _make_yield(self, names: tuple[str, ...]) -> None:
        for name, slot in self._slots.items():
            slot.is_yielding = name in names
        if not names:
            self.notify()

    def _never(self, slot: Slot, budget: int) -> str:
        pinned = {
            s.config.name: s.num_bytes for s in self._slots.values() if s.holds_room and s.config.residency == "device"
        }
        taken = "".join(f" and {name}, which stays, {gib(size)}" for name, size in pinned.items())
        return (
            f"{slot.config.name} needs {gib(slot.num_bytes)} of the device{taken}, and there are {gib(budget)} for weights: "
            "raise weights_gib, lower kv_gib, or let other models be auto"
        )
