"""Baseline: two sites drawn at random, the one with fewer requests under way first (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", IEEE TPDS 2001). Load is what the site published and this router has sent there since."""

import random
from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class PowerOfTwoPolicy:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = sorted(eligible(request, backends), key=lambda backend: backend.name)
        self._random.shuffle(sites)
        sites[:2] = sorted(sites[:2], key=requests_at)
        return [
            Preference(backend, requests_at(backend), {"requests": requests_at(backend)}, "draw") for backend in sites
        ]


def requests_at(backend: BackendView) -> float:
    published = backend.status.inflight if backend.status is not None and backend.status_is_fresh else 0
    return float(published + backend.pending_requests)
