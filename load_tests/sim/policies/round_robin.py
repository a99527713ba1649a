"""Baseline: every site in turn."""

from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class RoundRobinPolicy:
    def __init__(self) -> None:
        self._turn = 0

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = sorted(eligible(request, backends), key=lambda backend: backend.name)
        if not sites:
            return []
        start = self._turn % len(sites)
        self._turn += 1
        return [Preference(backend, 0.0, {}, "turn") for backend in sites[start:] + sites[:start]]
