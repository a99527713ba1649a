"""DeviceBudget for weights on one device: who holds it, who is put to sleep for whom, in which order the waking get it.

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
from runtime.engines.device_host import DeviceHost
from runtime.engines.host_memory import HostMemory
from runtime.engines.memory import GIB, gib
from runtime.engines.replica import Replica
from runtime.engines.residency import EvictionCandidate, could_ever_fit, make_room, must_yield
from sites.site import EngineConfig

log = logging.getLogger("pilotlight.models")

YIELD_AFTER_S = 2.0  # a waking model has waited so long for those in its way; then they take no new requests
_WORKSPACE = 0.1  # of a CUDA device's free memory, for activations and libraries


class Condition:
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


class DeviceBudget:
    def __init__(
        self,
        replicas: Iterable[Replica],
        host: DeviceHost,
        memory: HostMemory,
        config: EngineConfig,
        changed: Condition,
        on_eviction: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._replicas = {replica.state.config.name: replica for replica in replicas}
        self._host = host
        self._memory = memory
        self._config = config
        self._changed = changed
        self._on_eviction = on_eviction
        self._clock = clock
        self._turn = asyncio.Lock()  # fair: whoever asks first is served first

    async def take(self, replica: Replica) -> bool:
        """Returns when the replica has room, true if others were put to sleep for it. Raises EngineError when it never can have."""
        if replica.holds_memory:
            return False
        needed = replica.state.num_bytes
        async with self._turn:
            began = time.monotonic()
            try:
                while True:
                    budget, held = self.budget(), self._candidates()
                    plan = make_room(needed, budget, held)
                    if plan.is_possible:
                        break
                    assert budget is not None, "without a budget there is always room"
                    if not could_ever_fit(needed, budget, held):
                        raise EngineError("model_load_failed", self._never(replica, budget))
                    replica.state.detail = "waiting for room on the device"
                    waited_s = time.monotonic() - began
                    if waited_s >= YIELD_AFTER_S:
                        self._make_yield(must_yield(needed, budget, held))
                    patience = [YIELD_AFTER_S - waited_s] if waited_s < YIELD_AFTER_S else []
                    patience += [] if plan.wait_s is None else [plan.wait_s]
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(patience) + 0.001 if patience else None)
                replica.holds_memory = True
                # All at once, before anybody else has a turn to use one of them.
                asleep = [self._lay_down(self._replicas[name]) for name in plan.evict]
                await asyncio.gather(*map(asyncio.shield, asleep))
                return bool(plan.evict)
            finally:
                self._make_yield(())

    def give_back(self, replica: Replica) -> None:
        replica.holds_memory = False
        self._changed.notify_all()

    def suitability(self, replica: Replica) -> Suitability:
        """Of this device for the replica that would wake here."""
        others = [other for other in self._replicas.values() if other.holds_memory or other.task is not None]
        others = [other for other in others if other is not replica]
        plan = make_room(replica.state.num_bytes, self.budget(), [self._candidate(other) for other in others])
        crowding = 2 if self._turn.locked() or not plan.is_possible else 1 if plan.evict else 0
        crowding = 0 if replica.holds_memory else crowding
        is_soon = not self._host.is_hopeless and self._host.standby.state == "ready"
        delay = 0 if self._host.why_down is None or is_soon else 2 if self._host.is_hopeless else 1
        held = sum(other.state.num_bytes for other in others)
        return Suitability(delay, crowding, held, len(others), self._host.index)

    def could_take_quietly(self, replica: Replica) -> bool:
        """For a model that nobody has asked for: nobody may be put to sleep who is expected as soon."""
        if self._turn.locked():
            return False
        plan = make_room(replica.state.num_bytes, self.budget(), self._candidates())
        now = self._clock()
        mine = replica.state.arrivals.expected_in_s(now)
        others = [self._replicas[name].state.arrivals for name in plan.evict]
        return plan.is_possible and all(other.expected_in_s(now) > 2 * mine for other in others)

    async def put_to_sleep(self, replica: Replica) -> None:
        """Its weights stay in host memory where they have a place there. The caller has made sure that nobody uses it."""
        await asyncio.shield(self._lay_down(replica))

    def _lay_down(self, replica: Replica) -> "asyncio.Task[None]":
        """From this moment on nobody gets it."""
        assert replica.is_awake
        assert not replica.work.sequences, "a replica with open sequences is never put to sleep"
        assert replica.is_spare or not replica.state.users, "a model with open requests is never put to sleep"
        replica.lose()
        replica.state.detail, replica.state.evictions = "", replica.state.evictions + 1
        unloading = self._unload(replica, self._host.client)
        replica.falling_asleep = asyncio.create_task(unloading, name=f"unload {replica.state.config.name}")
        return replica.falling_asleep

    async def _unload(self, replica: Replica, client: EngineClient | None) -> None:
        name = replica.state.config.name
        try:
            if client is not None and client is self._host.client:
                with suppress(EngineError):  # the host died, and the model with it
                    await self._host.unload_model(name)
            where = "host" if self._memory.holds(replica.state) else "disk"
            log.info("model %s sleeps (%s)", name, where)
            self._on_eviction(name, where)
        finally:  # whoever wakes it again waits for this first
            replica.falling_asleep = None
            self.give_back(replica)

    def budget(self) -> int | None:
        """Bytes of weights that may be awake; None: whatever fits."""
        if self._config.weights_gib is not None:
            return round(self._config.weights_gib * GIB)
        ready = self._host.ready
        if ready is None or ready.device_bytes is None:
            return None
        return max(0, int(ready.device_bytes * (1 - _WORKSPACE) - self._config.kv_gib * GIB))

    def _candidates(self) -> list[EvictionCandidate]:
        return [self._candidate(replica) for replica in self._replicas.values() if replica.holds_memory]

    def _candidate(self, replica: Replica) -> EvictionCandidate:
        return replica.candidate(time.monotonic(), self._clock(), self._memory.holds(replica.state))

    def _make_yield(self, names: tuple[str, ...]) -> None:
        for name, replica in self._replicas.items():
            replica.is_yielding = name in names
        if not names:
            self._changed.notify_all()

    def _never(self, replica: Replica, budget: int) -> str:
        others = [other.state for other in self._replicas.values() if other.holds_memory]
        pinned = {state.config.name: state.num_bytes for state in others if state.config.residency == "device"}
        taken = "".join(f" and {name}, which stays, {gib(size)}" for name, size in pinned.items())
        return (
            f"{replica.state.config.name} needs {gib(replica.state.num_bytes)} of the device{taken}, and there are {gib(budget)} for weights: "
            "raise weights_gib, lower kv_gib, or let other models be auto"
        )
