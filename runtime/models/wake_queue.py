"""Requests that wait for a model: the first one wakes it, and all share the wake.

A drain refuses those that still wait. Independent of where and how a model wakes (wakes.py) and of eviction (device_budget.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pilotlight.runtime.generation.admission import shutting_down
from pilotlight.runtime.hosts.device_host import ChangeNotifier
from pilotlight.runtime.models.model_state import AwakeModel, ModelState
from pilotlight.wire.errors import ApiError


class WakeQueue:
    def __init__(self, wake: Callable[[ModelState], None], changed: ChangeNotifier, max_waking: int) -> None:
        """`wake` starts to wake a model.

        `max_waking` limits the requests that may wait for one model."""
        self._wake = wake
        self._changed = changed
        self._max_waking = max_waking
        self._is_draining = False
        self._waits: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """Refuse the requests that wait for a model.

        None of them has started here, and another site may have the model awake. A wake that outlasts the drain would only end in an error."""
        self._is_draining = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def until_available(self, state: ModelState) -> AwakeModel:
        """Wait until the model is awake and takes requests.

        Raises ApiError if it cannot be loaded, or if too many requests wait for it."""
        if self._is_draining:
            raise shutting_down()
        demand = state.demand
        if demand.queued >= self._max_waking:
            message = f"{demand.queued} requests wait for {state.name!r} to wake, which is the limit of this site; try again later"
            raise ApiError("overloaded", message, retry_after_s=max(1.0, state.expected_wake_s))
        demand.queued += 1
        try:
            async with self._until_drained():
                while state.is_yielding:
                    await self._changed.wait()
                return await self.until_awake(state)
        finally:
            demand.queued -= 1

    async def until_awake(self, state: ModelState) -> AwakeModel:
        """Wait until the model is awake. Raises ApiError if its wake fails."""
        history = state.history
        state.demand.waiters += 1
        try:
            while (loaded := state.loaded) is None:
                if not state.waking:
                    if history.failure is not None and history.has_failed_lately and not self.may_succeed_now(state):
                        raise history.failure
                    self._wake(state)
                task = state.waking[0].task
                assert task is not None
                await asyncio.shield(task)
                if history.failure is not None and not self.may_succeed_now(state):
                    raise history.failure
            return loaded
        finally:
            state.demand.waiters -= 1

    def may_succeed_now(self, state: ModelState) -> bool:
        """Return whether the last wake failed because no host was up, while one is up now."""
        return state.history.lacked_a_host and any(replica.host.why_down is None for replica in state.replicas)

    @asynccontextmanager
    async def _until_drained(self) -> AsyncIterator[None]:
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.expired():
                raise shutting_down() from None
            raise
