"""Memory for weights on one device: which models use it, and which sleep to make room for another.

residency.py decides; this module acts. Models get memory one at a time in order of arrival, so that a large model does not starve. A model waits
while others use the memory that it needs; after a while, these take no new requests until the waiting model has been served.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.runtime.hosts.device_host import ChangeNotifier, HostHandle
from pilotlight.runtime.hosts.memory import GIB, gib
from pilotlight.runtime.hosts.standby import Standby
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.runtime.models.residency import EvictionCandidate, could_ever_fit, make_room, must_yield
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.site import EngineConfig

log = logging.getLogger("pilotlight.models")


class Suitability(NamedTuple):
    """A device's rank for one more model; the device with the least tuple is the best."""

    delay: int  # 0: its host is up, 1: soon, 2: not soon
    crowding: int  # 0: there is room, 1: other models must sleep for it, 2: it must wait for other models
    num_bytes: int  # bytes of the other models' weights
    num_models: int
    device_index: int


class DeviceBudget:
    def __init__(
        self,
        states: Mapping[str, ModelState],
        host: HostHandle,
        standby: Standby,
        config: EngineConfig,
        changed: ChangeNotifier,
        on_eviction: Callable[[str, str], None],
        timings: SiteTimings,
    ) -> None:
        self._states = states
        self._host = host
        self._standby = standby
        self._config = config
        self._changed = changed
        self._on_eviction = on_eviction
        self._timings = timings
        self._turn = asyncio.Lock()  # a fair lock: first come, first served

    async def acquire(self, state: ModelState) -> bool:
        """Wait until the model has memory on this device; return whether others were put to sleep for it.

        Raises EngineError if it can never have enough."""
        if self._replica(state).holds_memory:
            return False
        needed = state.num_bytes
        async with self._turn:
            began = time.monotonic()
            try:
                while True:
                    limit, held = self.weights_limit(), self._candidates()
                    plan = make_room(needed, limit, held)
                    if plan.is_possible:
                        break
                    assert limit is not None, "without a limit there is always room"
                    if not could_ever_fit(needed, limit, held):
                        raise EngineError("model_load_failed", self._never_fits(state, limit))
                    state.detail = "waiting for room on the device"
                    left_s = began + self._timings.yield_after_s - time.monotonic()
                    if left_s <= 0.0:
                        self._make_yield(must_yield(needed, limit, held))
                    waits_s = [left_s] if left_s > 0.0 else []
                    waits_s += [] if plan.wait_s is None else [plan.wait_s]
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(waits_s) + 0.001 if waits_s else None)
                self._replica(state).holds_memory = True
                # No await between the plan and this: a request could start to use one of the models in it.
                asleep = [self._begin_sleep(self._states[name]) for name in plan.evict]
                await asyncio.gather(*map(asyncio.shield, asleep))
                return bool(plan.evict)
            finally:
                self._make_yield(())

    def release(self, state: ModelState) -> None:
        self._replica(state).holds_memory = False
        self._changed.notify_all()

    def suitability(self, state: ModelState) -> Suitability:
        """Return how well this device suits a further replica of the model."""
        others = [
            other
            for other in self._states.values()
            if other is not state and (self._replica(other).holds_memory or self._replica(other).task is not None)
        ]
        plan = make_room(state.num_bytes, self.weights_limit(), [self._candidate(other) for other in others])
        crowding = 2 if self._turn.locked() or not plan.is_possible else 1 if plan.evict else 0
        crowding = 0 if self._replica(state).holds_memory else crowding
        is_soon = not self._host.restarts.is_hopeless and self._standby.state == "ready"
        delay = 0 if self._host.why_down is None or is_soon else 2 if self._host.restarts.is_hopeless else 1
        held = sum(other.num_bytes for other in others)
        return Suitability(delay, crowding, held, len(others), self._host.index)

    def could_take_quietly(self, state: ModelState) -> bool:
        """Return whether a model without requests fits.
        Only models whose next request is expected much later may be put to sleep for it."""
        if self._turn.locked():
            return False
        plan = make_room(state.num_bytes, self.weights_limit(), self._candidates())
        now = self._timings.clock()
        mine = state.demand.arrivals.expected_in_s(now)
        others = [self._states[name].demand.arrivals for name in plan.evict]
        return plan.is_possible and all(other.expected_in_s(now) > 2 * mine for other in others)

    def discard(self, state: ModelState) -> None:
        """Unload a model whose wake has failed: its host may have loaded it, or be loading it still."""
        self._replica(state).start_unloading(self._unload(state, self._host.client))

    async def put_to_sleep(self, state: ModelState) -> None:
        """Unload the model's weights; they stay in host memory if there is room.

        The caller makes sure that no request uses the model.
        """
        await asyncio.shield(self._begin_sleep(state))

    def weights_limit(self) -> int | None:
        """Return the limit of awake weights in bytes, or None for no limit."""
        if self._config.weights_gib is not None:
            return round(self._config.weights_gib * GIB)
        return None if self._host.ready is None else self._host.ready.weights_bytes

    def _replica(self, state: ModelState) -> Replica:
        return state.replicas[self._host.index]

    def _begin_sleep(self, state: ModelState) -> "asyncio.Task[None]":
        """Start to unload the model. New requests do not get it on this device."""
        replica = self._replica(state)
        assert replica.is_awake
        assert not replica.work.sequences, "a replica with open sequences is never put to sleep"
        assert state.is_spare(replica) or not state.demand.users, "a model with open requests is never put to sleep"
        state.lose(replica)
        state.detail = ""
        state.history.evictions += 1
        return replica.start_unloading(self._unload(state, self._host.client, self._note_sleep))

    async def _unload(
        self, state: ModelState, client: EngineClient | None, note: Callable[[ModelState], None] = lambda state: None
    ) -> None:
        try:
            if client is not None and client is self._host.client:
                with suppress(EngineError):  # if the host died, the model is gone as well
                    await self._host.unload_model(state.name)
            note(state)
        finally:  # the model's next wake waits for this
            self._replica(state).end_unloading()
            self.release(state)

    def _note_sleep(self, state: ModelState) -> None:
        where = "host" if state.is_in_host_memory else "disk"
        log.info("model %s sleeps (%s)", state.name, where)
        self._on_eviction(state.name, where)

    def _candidates(self) -> list[EvictionCandidate]:
        return [self._candidate(state) for state in self._holding()]

    def _candidate(self, state: ModelState) -> EvictionCandidate:
        return state.device_candidate(self._replica(state), time.monotonic(), self._timings.clock())

    def _holding(self) -> list[ModelState]:
        return [state for state in self._states.values() if self._replica(state).holds_memory]

    def _make_yield(self, names: tuple[str, ...]) -> None:
        for name, state in self._states.items():
            self._replica(state).is_yielding = name in names
        if not names:
            self._changed.notify_all()

    def _never_fits(self, state: ModelState, limit: int) -> str:
        pinned = {other.name: other.num_bytes for other in self._holding() if other.config.residency == "device"}
        taken = "".join(f" and {name}, which stays, {gib(size)}" for name, size in pinned.items())
        return (
            f"{state.name} needs {gib(state.num_bytes)} of the device{taken}, and there are {gib(limit)} for weights: "
            "raise weights_gib, lower kv_gib, or set the residency of other models to auto"
        )
