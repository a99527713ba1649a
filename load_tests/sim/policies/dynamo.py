"""Baseline: the cost of NVIDIA Dynamo's KV router, as its documentation describes it: prompt blocks that would be computed there, what is being
computed included, plus blocks of active decodes; lowest first, or drawn by a softmax of the normalised costs where a temperature is given. It knows
no distance."""

import math
import random
from collections.abc import Sequence

from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible

BLOCK_TOKENS = 16


class DynamoPolicy:
    def __init__(self, overlap_weight: float = 1.0, temperature: float = 0.0, seed: int = 0) -> None:
        self._overlap_weight = overlap_weight
        self._temperature = temperature
        self._random = random.Random(seed)

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(self._terms(request, backend), backend) for backend in eligible(request, backends)]
        priced.sort(key=lambda pair: (sum(pair[0].values()), pair[1].name))
        if self._temperature > 0 and len(priced) > 1:
            priced.insert(0, priced.pop(self._drawn([sum(terms.values()) for terms, _ in priced])))
        return [Preference(backend, sum(terms.values()), terms, "cost") for terms, backend in priced]

    def _drawn(self, costs: list[float]) -> int:
        low, high = min(costs), max(costs)
        span = (high - low) or 1.0
        weights = [math.exp(-(cost - low) / span / self._temperature) for cost in costs]
        return self._random.choices(range(len(costs)), weights)[0]

    def _terms(self, request: RouteRequest, backend: BackendView) -> dict[str, float]:
        model = backend.model(request.model) if request.model is not None else None
        active = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
        decoding = model.kv_blocks_total - model.kv_blocks_free if model is not None else 0
        prefill = max(active + request.prompt_tokens - backend.cached_tokens(request), 0) / BLOCK_TOKENS
        return {"prefill_blocks": self._overlap_weight * prefill, "decode_blocks": float(decoding)}
