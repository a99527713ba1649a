"""Baseline: GORGO's cost (arXiv 2602.11688): network latency plus queued prefill work plus prefill of the prompt's uncached part, lowest first, with
each site's own measured prefill rate. It knows no waking, no crowding and no staleness."""

from collections.abc import Sequence

from edge_router.policy import BackendView, Preference, RouteRequest, eligible

GUESSED_TOKENS_PER_S = 2000.0


class GorgoPolicy:
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(self._terms(request, backend), backend) for backend in eligible(request, backends)]
        priced.sort(key=lambda pair: (sum(pair[0].values()), pair[1].name))
        return [Preference(backend, sum(terms.values()), terms, "cost") for terms, backend in priced]

    def _terms(self, request: RouteRequest, backend: BackendView) -> dict[str, float]:
        model = backend.model(request.model) if request.model is not None else None
        rate = model.prefill_tokens_per_s if model is not None else 0.0
        ms_per_token = 1000 / (rate if rate > 0 else GUESSED_TOKENS_PER_S)
        queued = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
        return {
            "rtt": backend.rtt_ms,
            "queue": queued * ms_per_token,
            "prefill": (request.prompt_tokens - backend.cached_tokens(request)) * ms_per_token,
        }
