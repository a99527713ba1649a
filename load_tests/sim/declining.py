"""Any policy with the sites' help that ours has: each choice but the last carries the queue beyond which its site had better decline."""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from load_tests.sim.oracle import InformedPolicy
from load_tests.sim.site import SimSite
from load_tests.sim.traces import Turn
from pilotlight.edge_router.routing.views import BackendView, Policy, Preference, RouteRequest

GUESSED_TOKENS_PER_S = 2000.0


class DecliningPolicy(InformedPolicy):
    def __init__(self, policy: Policy, slack_ms: float = 150.0, has_ms: bool = True) -> None:
        """`slack_ms`: by how much the queue may be longer than known; `has_ms`: costs are times, so what the next site costs more is added."""
        super().__init__()
        self._policy = policy
        self._slack_ms = slack_ms
        self._has_ms = has_ms

    def see(self, sites: Sequence[SimSite], rtt_s: Sequence[float], turn: Turn, now: float) -> None:
        if isinstance(self._policy, InformedPolicy):
            self._policy.see(sites, rtt_s, turn, now)

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        order = self._policy.rank(request, backends)
        for number, (each, following) in enumerate(pairwise(order)):
            margin_ms = max(0.0, following.cost_ms - each.cost_ms) if self._has_ms else 0.0
            max_queue_ms = _queue_ms(request, each.backend) + margin_ms + self._slack_ms
            order[number] = replace(each, max_queue_ms=max_queue_ms)
        return order


def _queue_ms(request: RouteRequest, backend: BackendView) -> float:
    model = backend.model(request.model) if request.model is not None else None
    queued = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
    rate = model.prefill_tokens_per_s if model is not None and model.prefill_tokens_per_s > 0 else GUESSED_TOKENS_PER_S
    return 1000 * queued / rate
