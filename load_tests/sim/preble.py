"""Baseline: Preble's E2 rule (arXiv 2407.00023), with round trips added: exploit a prefix where more of the prompt is cached than is not, among those
that hold most of it the least loaded; else explore, the least of round trip, queue and prefill. A holder that is so many times as loaded as the least
loaded site is not exploited."""

from collections.abc import Sequence

from load_tests.sim.policies.gorgo import GorgoPolicy
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class PreblePolicy:
    def __init__(self, exploit_share: float = 0.5, imbalance_ms: float = 2000.0) -> None:
        self._exploit_share = exploit_share
        self._imbalance_ms = imbalance_ms
        self._explore = GorgoPolicy()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        order = self._explore.rank(request, eligible(request, backends))
        if not order:
            return order
        cached = {each.backend.name: each.backend.cached_tokens(request) for each in order}
        most, least_queue = max(cached.values()), min(each.terms["queue"] for each in order)
        if most <= self._exploit_share * request.prompt_tokens:
            return order

        def is_exploited(each: Preference) -> bool:
            return cached[each.backend.name] == most and each.terms["queue"] - least_queue <= self._imbalance_ms

        return sorted(order, key=lambda each: not is_exploited(each))
