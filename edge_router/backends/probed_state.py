"""The state of a site by its probes.

A flapping site is excluded, and a recovered one gets its full load slowly.
"""

from collections.abc import Callable

from pilotlight.edge_router.routing.views import State
from pilotlight.sites.network import HealthConfig
from pilotlight.wire.hop.status import SiteStatus

SLOW_START_S = 10.0  # time after an outage in which the site's load grows to its full share: with an empty queue it would get all requests
RECOVER_AFTER = 2  # good probes in a row, after which a site that was healthy before and then failed is trusted again


class ProbedState:
    def __init__(self, config: HealthConfig, clock: Callable[[], float]) -> None:
        self.state: State = "unknown"
        self.detail = "not yet asked"  # the reason of the state
        self.refuses_hops = False  # the site refuses this router's signatures
        self.was_healthy = False
        self.slow_start_until = float("-inf")
        self.failures = 0  # failed probes in a row
        self._successes = 0  # good probes in a row
        self._config = config
        self._clock = clock

    def answered(self, status: SiteStatus) -> None:
        self.refuses_hops = False
        self.failures = 0
        if status.draining:
            self.set_state("draining", "the site is draining")
        elif not status.ready:
            self.set_state("unhealthy", "the site is not ready")
        else:
            self._successes += 1
            flapping = self.state == "unhealthy" and self.was_healthy
            if not flapping or self._successes >= RECOVER_AFTER:
                if self.was_healthy and self.state == "unhealthy":
                    self.slow_start_until = self._clock() + SLOW_START_S
                self.set_state("healthy", "")
                self.was_healthy = True

    def failed(self, reason: str) -> bool:
        """Record a failed probe; return whether the site now counts as lost."""
        self.failures += 1
        self._successes = 0
        if self.failures < self._config.unhealthy_after:
            return False
        self.refuses_hops = False
        self.set_state("unhealthy", reason)
        return True

    def set_state(self, state: State, detail: str) -> None:
        if state != "healthy":
            self._successes = 0
        self.state, self.detail = state, detail
