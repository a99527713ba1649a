"""Baseline: llm-d's weighted scores with the weights of its default profile.

Prefix match 3, queue depth 2, KV utilisation 2; each score is between 0 and 1 over the candidates, the highest sum first. It ignores distance, unless
a weight is given to a score of round trips, computed like the others.
"""

from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class WeightedScoresPolicy:
    def __init__(
        self, prefix: float = PREFIX_WEIGHT, queue: float = QUEUE_WEIGHT, kv: float = KV_WEIGHT, rtt: float = 0.0
    ) -> None:
        self._prefix, self._queue, self._kv, self._rtt = prefix, queue, kv, rtt

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        sites = eligible(request, backends)
        queues = [_queue(request, backend) for backend in sites]
        low, high = min(queues, default=0), max(queues, default=0)
        near, far = (f((b.rtt_ms for b in sites), default=0.0) for f in (min, max))
        scored = []
        for backend, queue in zip(sites, queues, strict=True):
            terms = {
                "prefix": self._prefix * backend.cached_tokens(request) / max(1, request.prompt_tokens),
                "queue": self._queue * ((high - queue) / (high - low) if high > low else 1.0),
                "kv": self._kv * (1 - _kv_utilisation(request, backend)),
            }
            if self._rtt:
                terms["rtt"] = self._rtt * ((far - backend.rtt_ms) / (far - near) if far > near else 1.0)
            scored.append((-sum(terms.values()), backend.name, backend, terms))
        return [
            Preference(backend, cost, terms, "score")
            for cost, _, backend, terms in sorted(scored, key=lambda row: row[:2])
        ]


def _queue(request: RouteRequest, backend: BackendView) -> int:
    model = backend.model(request.model) if request.model is not None else None
    return backend.pending_requests + (model.waiting if model is not None else 0)


def _kv_utilisation(request: RouteRequest, backend: BackendView) -> float:
    model = backend.model(request.model) if request.model is not None else None
    return 1 - model.kv_blocks_free / model.kv_blocks_total if model is not None and model.kv_blocks_total else 0.0
