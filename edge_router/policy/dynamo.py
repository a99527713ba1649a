"""Baseline: the cost of NVIDIA Dynamo's KV router, as its documentation describes it: prompt blocks that would be computed there, what is being
computed included, plus blocks of active decodes; lowest first, temperature 0. It knows no distance."""

from collections.abc import Sequence

from edge_router.policy import BackendView, Preference, RouteRequest, eligible

OVERLAP_WEIGHT = 1.0
BLOCK_TOKENS = 16


class DynamoPolicy:
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(self._terms(request, backend), backend) for backend in eligible(request, backends)]
        priced.sort(key=lambda pair: (sum(pair[0].values()), pair[1].name))
        return [Preference(backend, sum(terms.values()), terms, "cost") for terms, backend in priced]

    def _terms(self, request: RouteRequest, backend: BackendView) -> dict[str, float]:
        model = backend.model(request.model) if request.model is not None else None
        active = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
        decoding = model.kv_blocks_total - model.kv_blocks_free if model is not None else 0
        prefill = max(active + request.prompt_tokens - backend.cached_tokens(request), 0) / BLOCK_TOKENS
        return {"prefill_blocks": OVERLAP_WEIGHT * prefill, "decode_blocks": float(decoding)}
