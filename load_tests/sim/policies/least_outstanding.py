"""Baseline: the site with the fewest of this router's own open requests; the nearest among equals."""

from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class LeastOutstandingPolicy:
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = sorted(eligible(request, backends), key=lambda b: (b.outstanding, b.rtt_ms, b.name))
        return [
            Preference(backend, float(backend.outstanding), {"outstanding": float(backend.outstanding)}, "least")
            for backend in sites
        ]
