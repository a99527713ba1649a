"""Baseline: the cache-aware rule of the SGLang model gateway, as its documentation describes it (defaults: cache threshold 0.3, balance thresholds
64 requests and 1.5 times). Out of balance: the least loaded. Else the longest known prefix if it covers the threshold's share, else the site whose
record of prompts is smallest. Load is this router's own requests; the record is the prompt tokens it has sent."""

from collections import Counter
from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5


class CacheAwarePolicy:
    def __init__(
        self, cache_share: float = CACHE_THRESHOLD, balance_abs: float = BALANCE_ABS, balance_rel: float = BALANCE_REL
    ) -> None:
        self._cache_share, self._balance_abs, self._balance_rel = cache_share, balance_abs, balance_rel
        self._record: Counter[str] = Counter()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = sorted(eligible(request, backends), key=lambda backend: backend.name)
        if not sites:
            return []
        loads = [backend.outstanding for backend in sites]
        share = max(request.sent_tokens(backend.name) for backend in sites) / max(1, request.prompt_tokens)
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            reason, keys = "balance", [float(load) for load in loads]
        elif share > self._cache_share:
            reason, keys = "prefix", [-float(request.sent_tokens(backend.name)) for backend in sites]
        else:
            reason, keys = "smallest", [float(self._record[backend.name]) for backend in sites]
        order = sorted(zip(keys, sites, strict=True), key=lambda pair: (pair[0], pair[1].outstanding, pair[1].name))
        self._record[order[0][1].name] += request.uncached_tokens(order[0][1].name)
        return [Preference(backend, key, {reason: key}, reason) for key, backend in order]
