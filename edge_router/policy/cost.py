"""The policy: predict, in milliseconds, how long each site needs to answer, and take the site that answers first.

    cost = rtt + queue_ahead + prefill(uncached tokens) + wake(model) + decode_crowding

Each term comes from what the site published, corrected by what this router has sent there since; where a figure is missing or stale, a
conservative stand-in takes its place. Differences too small to trust do not move a conversation away from its cache, nor do they send every
new conversation to one of several equal sites: among equals the home wins, then rendezvous hashing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_router.placement import placement_order
from edge_router.policy import BackendView, Preference, RouteRequest, eligible
from edge_router.rtt import seed_rtt_ms
from wire.status import ModelStatus


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the policy believes where nobody has measured, and what it holds to be equal."""

    prefill_tokens_per_s: float = 2000.0  # 0.5 ms a token; a 32B on a datacentre GPU needs about 0.37
    decode_tokens_per_s: float = 50.0
    wake_ms: float = 5000.0  # a model that must first be read from disk
    queued_tokens: int = 1024  # at a site that has not said lately
    occupancy: float = 0.5  # likewise
    crowding_ms: float = 150.0  # times k / (1 - k), k the site's utilisation
    output_tokens: int = 64  # of a typical answer that neighbours slow down
    neighbour_share: float = 0.02  # by which each running sequence lengthens a decode step
    saturated_ms: float = 10_000.0  # a site without a free permit would refuse: nearly the last resort
    reach_ms: float = 25.0  # within measurement noise, and below what a reader notices
    loyalty_ms: float = 50.0  # the same, for a client that named its session and so asked to stay


class CostPolicy:
    def __init__(self, assumptions: Assumptions | None = None) -> None:
        self.assumptions = assumptions or Assumptions()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(backend, self.terms(request, backend)) for backend in eligible(request, backends)]
        priced.sort(key=lambda pair: (sum(pair[1].values()), pair[0].name))
        order, reason = self._among_equals(request, [(backend, sum(terms.values())) for backend, terms in priced])
        terms_of = {backend.name: terms for backend, terms in priced}
        return [
            Preference(
                backend, sum(terms_of[backend.name].values()), terms_of[backend.name], reason if i == 0 else "spill"
            )
            for i, backend in enumerate(order)
        ]

    def terms(self, request: RouteRequest, backend: BackendView) -> dict[str, float]:
        model = backend.model(request.model) if request.model is not None else None
        return {
            "rtt": _rtt_ms(request, backend),
            "queue_ahead": self._queue_ahead_ms(request, backend, model),
            "prefill": 1000 * request.uncached_tokens(backend.name) / self._prefill_rate(model),
            "wake": self._wake_ms(model),
            "decode_crowding": self._decode_crowding_ms(request, backend, model),
        }

    def _among_equals(
        self, request: RouteRequest, priced: list[tuple[BackendView, float]]
    ) -> tuple[list[BackendView], str]:
        """`priced` cheapest first -> the order to try, and which branch of the policy chose its first."""
        order = [backend for backend, _ in priced]
        if len(order) <= 1:
            return order, "only"
        cheapest, home, reason = priced[0][1], request.home, "cheapest"
        if home is not None:
            costs = {backend.name: cost for backend, cost in priced}
            loyalty = self.assumptions.loyalty_ms if home.by_name else self.assumptions.reach_ms
            if costs.get(home.site, math.inf) <= cheapest + loyalty:
                return sorted(order, key=lambda backend: backend.name != home.site), "home"
            reason = "home_too_dear" if home.site in costs else "home_lost"
        near = [backend for backend, cost in priced if cost <= cheapest + self.assumptions.reach_ms]
        if request.placement_key is None or len(near) == 1:
            return order, reason
        placed = placement_order(request.placement_key, near)
        return [*placed, *order[len(near) :]], "placed" if reason == "cheapest" else reason

    def _queue_ahead_ms(self, request: RouteRequest, backend: BackendView, model: ModelStatus | None) -> float:
        """Prompt tokens that are computed before ours."""
        if request.model is None or (model is None and backend.status is not None):
            queued = 0
        elif model is None or not backend.status_is_fresh:
            queued = self.assumptions.queued_tokens + backend.pending_tokens
        else:
            queued = model.queued_tokens + backend.pending_tokens
        occupancy = backend.occupancy
        refused = self.assumptions.saturated_ms if occupancy is not None and occupancy >= 1 else 0.0
        return 1000 * queued / self._prefill_rate(model) + refused

    def _prefill_rate(self, model: ModelStatus | None) -> float:
        """A rate changes slowly, so that even a stale one is better than a guess."""
        measured = model.prefill_tokens_per_s if model is not None else 0.0
        return measured if measured > 0 else self.assumptions.prefill_tokens_per_s

    def _wake_ms(self, model: ModelStatus | None) -> float:
        if model is None or model.residency == "device":
            return 0.0
        return model.wake_ms if model.wake_ms > 0 else self.assumptions.wake_ms

    def _decode_crowding_ms(self, request: RouteRequest, backend: BackendView, model: ModelStatus | None) -> float:
        """What the sequences already decoding there take from ours."""
        if request.model is None or (model is None and backend.status is not None):
            return 0.0
        occupancy = backend.occupancy
        if model is None or occupancy is None:
            return _crowding(self.assumptions.crowding_ms, self.assumptions.occupancy)
        utilisation = max(occupancy, _kv_utilisation(model))
        rate = model.decode_tokens_per_s if model.decode_tokens_per_s > 0 else self.assumptions.decode_tokens_per_s
        neighbours = model.running + model.waiting + backend.pending_requests
        answer_ms = 1000 * self.assumptions.output_tokens / rate
        slowed = answer_ms * self.assumptions.neighbour_share * neighbours
        return _crowding(self.assumptions.crowding_ms, utilisation) + slowed


def _rtt_ms(request: RouteRequest, backend: BackendView) -> float:
    """From the router, or from where the client is said to stand: then geography decides, plus what the router measures above its own estimate
    (a site that answers late is late for everybody)."""
    if request.client is None:
        return backend.rtt_ms
    return seed_rtt_ms(request.client, backend.place) + max(0.0, backend.rtt_ms - backend.seed_rtt_ms)


def _kv_utilisation(model: ModelStatus) -> float:
    """Of sequences at work: what an idle model keeps is cache, which gives way."""
    if model.kv_blocks_total <= 0 or model.running + model.waiting == 0:
        return 0.0
    return 1 - model.kv_blocks_free / model.kv_blocks_total


def _crowding(scale_ms: float, utilisation: float) -> float:
    k = min(max(utilisation, 0.0), 0.95)
    return scale_ms * k / (1 - k)
