"""Baseline: GORGO's cost (arXiv 2602.11688): network latency plus queued prefill work plus prefill of the prompt's uncached part, lowest first, with
each site's own measured prefill rate. Each term has a weight, which its authors tune to the traffic. It knows no waking, crowding or staleness."""

from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible

GUESSED_TOKENS_PER_S = 2000.0


class GorgoPolicy:
    def __init__(self, rtt_weight: float = 1.0, queue_weight: float = 1.0, prefill_weight: float = 1.0) -> None:
        self._weights = rtt_weight, queue_weight, prefill_weight

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(self._terms(request, backend), backend) for backend in eligible(request, backends)]
        priced.sort(key=lambda pair: (sum(pair[0].values()), pair[1].name))
        return [Preference(backend, sum(terms.values()), terms, "cost") for terms, backend in priced]

    def _terms(self, request: RouteRequest, backend: BackendView) -> dict[str, float]:
        model = backend.model(request.model) if request.model is not None else None
        rate = model.prefill_tokens_per_s if model is not None else 0.0
        ms_per_token = 1000 / (rate if rate > 0 else GUESSED_TOKENS_PER_S)
        queued = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
        rtt_weight, queue_weight, prefill_weight = self._weights
        return {
            "rtt": rtt_weight * backend.rtt_ms,
            "queue": queue_weight * queued * ms_per_token,
            "prefill": prefill_weight * (request.prompt_tokens - backend.cached_tokens(request)) * ms_per_token,
        }
