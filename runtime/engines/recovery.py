"""What happens to models when their engine host dies, and when there is one again. Refuses to know what becomes of open sequences."""

from collections.abc import Sequence

from runtime.engines.device_budget import DeviceBudget
from runtime.engines.device_host import DeviceHost
from runtime.engines.model_state import ModelState
from runtime.engines.wake_queue import WakeQueue


class Recovery:
    def __init__(self, states: Sequence[ModelState], budgets: Sequence[DeviceBudget], queue: WakeQueue) -> None:
        self._states = states
        self._budgets = budgets
        self._queue = queue

    def on_down(self, host: DeviceHost, reason: str) -> None:
        """Forget every replica that the host held. Of the models that are nowhere else, those in use, and those that stay, wake again, in this
        order."""
        budget = self._budgets[host.index]
        lost = [state for state in self._states if state.replicas[host.index].is_awake]
        for state in sorted(lost, key=lambda state: state.demand.users == 0):
            replica = state.replicas[host.index]
            state.lose(replica)
            if state.awake or state.waking:
                budget.release(state)
                continue
            state.history.is_cut = True
            if state.demand.users or state.config.residency == "device":
                state.detail = reason
                self._queue.begin(state)
            if replica.task is None:  # it sleeps, or wakes elsewhere
                budget.release(state)

    def on_up(self) -> None:
        """Wake what could not be loaded for want of a host."""
        for state in self._states:
            if state.history.lacked_a_host and not state.waking:
                self._queue.begin(state)
