"""Baseline: SkyWalker's two layers (arXiv 2505.24095), by its paper: a region's balancer knows its own sites at once, others by what they publish.

A request is pushed to a site only while fewer than a number of requests wait there; among those the longest known prefix, if it covers a share of the
prompt, else the fewest requests. Where no local site is free, a remote region's is, by the same rule; where none is, the local site with the fewest.
"""

from collections.abc import Sequence

from load_tests.sim.oracle import InformedPolicy
from load_tests.sim.world import REGION_MS
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class SkyWalkerPolicy(InformedPolicy):
    def __init__(self, max_waiting: int = 2, match_share: float = 0.5) -> None:
        super().__init__()
        self._max_waiting = max_waiting
        self._match_share = match_share

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = eligible(request, backends)
        if not sites:
            return []
        nearest_ms = min(backend.rtt_ms for backend in sites)
        local = {backend.name for backend in sites if backend.rtt_ms <= max(REGION_MS, nearest_ms)}
        keyed = sorted(sites, key=lambda backend: self._key(request, backend, backend.name in local))
        return [
            Preference(
                backend,
                backend.rtt_ms,
                {"waiting": float(self._waiting(request, backend, backend.name in local))},
                "local" if backend.name in local else "remote",
            )
            for backend in keyed
        ]

    def _key(self, request: RouteRequest, backend: BackendView, is_local: bool) -> tuple[bool, bool, float, float, str]:
        waiting = self._waiting(request, backend, is_local)
        share = backend.cached_tokens(request) / max(1, request.prompt_tokens)
        matched = -share if share >= self._match_share else 0.0
        is_full = waiting >= self._max_waiting
        return is_full, not is_local, 0.0 if is_full else matched, waiting, backend.name

    def _waiting(self, request: RouteRequest, backend: BackendView, is_local: bool) -> int:
        if is_local:
            return self.by_name[backend.name].waiting
        model = backend.model(request.model) if request.model is not None else None
        return backend.pending_requests + (model.waiting if model is not None else 0)
