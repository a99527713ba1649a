"""Baseline: a session stays at its site whatever that is doing, and a new one starts at the nearest: Cloudflare's `x-session-affinity` as its
documentation describes it. The home stands for the header: whoever uses this baseline names every session."""

from collections.abc import Sequence

from load_tests.sim.policies.nearest import NearestPolicy
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest


class HeaderAffinityPolicy:
    def __init__(self) -> None:
        self._nearest = NearestPolicy()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        order = self._nearest.rank(request, backends)
        if request.home is None:
            return order
        site = request.home.site
        return sorted(order, key=lambda preference: preference.backend.name != site)
