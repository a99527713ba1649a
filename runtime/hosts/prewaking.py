"""Acts without a request: wakes a model shortly before its next one, puts long-idle models to sleep.

It checks the models once a second. At the start it also loads the weights that stay in host memory. Independent of the prediction (demand.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from pilotlight.runtime.models.device_budget import DeviceBudget
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.runtime.models.wake_queue import WakeQueue
from pilotlight.runtime.timings import SiteTimings
from pilotlight.wire.errors import ApiError

log = logging.getLogger("pilotlight.models")


class Foresight:
    def __init__(
        self,
        states: Collection[ModelState],
        budgets: Sequence[DeviceBudget],
        queue: WakeQueue,
        wake: Callable[[ModelState, Sequence[Replica]], None],
        timings: SiteTimings,
    ) -> None:
        """`states` is a view of the models, which may change.

        `wake` starts to wake a model as one of the given replicas."""
        self._states = states
        self._budgets = budgets
        self._queue = queue
        self._wake = wake
        self._timings = timings

    async def run(self) -> None:
        """Check the models periodically, until cancelled."""
        await self._fill_host_memory()
        while True:
            await asyncio.sleep(self._timings.foresight_s)
            for state in tuple(self._states):
                try:
                    await self._look(state)
                except Exception:  # after any exception the other models are still checked
                    log.exception("checking whether to wake model %s in advance", state.name)

    async def _look(self, state: ModelState) -> None:
        if state.is_asleep and self._is_expected(state):
            self._wake_quietly(state)
        elif state.is_asleep and self._is_missed(state):
            self._wake(state, state.replicas)
        elif _has_idled(state):
            await self._put_to_sleep(state)

    def _is_expected(self, state: ModelState) -> bool:
        lead_s = self._timings.foresight_s + 2 * state.expected_wake_s
        return state.history.failure is None and state.demand.arrivals.is_due(self._timings.clock(), lead_s)

    def _wake_quietly(self, state: ModelState) -> None:
        """Wake the model, unless a model that is expected sooner would have to sleep for it."""
        quiet = [replica for replica in state.replicas if self._budgets[replica.host.index].could_take_quietly(state)]
        if state.info is not None and quiet:
            log.info("model %s is expected and wakes", state.name)
            self._wake(state, quiet)

    def _is_missed(self, state: ModelState) -> bool:
        """Return whether a pinned model could not be loaded, and may be tried again."""
        is_lost = state.history.failure is not None and state.config.residency == "device"
        return is_lost and (not state.history.is_given_up or self._queue.may_succeed_now(state))

    async def _put_to_sleep(self, state: ModelState) -> None:
        """Put the model to sleep on every device."""
        for replica in state.awake:
            # a request may have arrived while the previous replica fell asleep
            if replica.is_awake and not state.is_replica_busy(replica):
                await self._budgets[replica.host.index].put_to_sleep(state)

    async def _fill_host_memory(self) -> None:
        """Load each model that stays in host memory once, one after the other, and put it to sleep again."""
        for state in tuple(self._states):
            if state.config.residency == "host" and not state.awake:
                with suppress(ApiError):  # the reason was logged, and a request will try again
                    await self._queue.until_awake(state)
                    await self._put_to_sleep(state)


def _has_idled(state: ModelState) -> bool:
    limit_s = state.config.sleep_after_s
    if limit_s is None or not state.awake or state.is_busy:
        return False
    return time.monotonic() - state.demand.used_at > limit_s
