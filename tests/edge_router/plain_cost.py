"""The cost policy's formula once more, site by site and without anything looked up beforehand: what the fast form is held to, bit for bit."""

from collections.abc import Sequence

from edge_router.policy import BackendView, RouteRequest, eligible
from edge_router.policy.cost import Assumptions
from edge_router.rtt import seed_rtt_ms


def plain_costs(request: RouteRequest, backends: Sequence[BackendView]) -> dict[str, tuple[float, dict[str, float]]]:
    """By site: what sites are compared by, and the terms of the cost."""
    return {
        backend.name: _price(request, backend, eligible(request, backends)) for backend in eligible(request, backends)
    }


def _price(request: RouteRequest, site: BackendView, others: Sequence[BackendView]) -> tuple[float, dict[str, float]]:
    believed, status = Assumptions(), site.status
    model = site.model(request.model) if request.model is not None else None
    rate = model.prefill_tokens_per_s if model is not None else 0.0
    ms = 1000 / (rate if rate > 0 else believed.prefill_tokens_per_s)
    rtt = site.rtt_ms
    if request.client is not None:
        rtt = seed_rtt_ms(request.client, site.place) + max(0.0, site.rtt_ms - site.seed_rtt_ms)
    prefill = queue = wake = crowding = staleness_ms = externality_ms = 0.0
    if request.model is not None and (model is not None or status is None):
        cached = site.cached_tokens(request)
        most = max(other.cached_tokens(request) for other in others)
        prefill = (request.prompt_tokens - cached) * ms
        externality_ms = _mean_load(request, others) * min(
            believed.repeat_max_ms, believed.repeat * (max(0, most - cached) * ms)
        )
        queue = site.pending_tokens * ms
        if model is not None:
            load = min(believed.busiest, model.arriving_tokens_per_s * ms / 1000)
            sent = site.pending_tokens * ms
            age = max(0.0, request.now_s - site.status_at_s) * 1000
            since = max(0.0, request.now_s - site.pending_since_s) * 1000
            queue = max(0.0, model.queued_tokens * ms + sent - age * (1 - load), sent - since)
            if model.residency != "device":
                wake = model.wake_ms if model.wake_ms > 0 else believed.wake_ms
            busy = model.kv_blocks_total > 0 and model.running + model.waiting > 0
            kv = 1 - model.kv_blocks_free / model.kv_blocks_total if busy else 0.0
            k = min(max(_occupancy(site), kv, 0.0), 0.95)
            crowding = 1000 / model.decode_tokens_per_s / (1 - k) if model.decode_tokens_per_s > 0 else 0.0
            externality_ms += prefill * (model.arriving_per_s * (queue + wake + prefill / 2) / 1000 / (1 - load))
        if not site.status_is_fresh or status is None:
            staleness_ms = believed.staleness_ms + believed.queued_tokens * ms
    elif not site.status_is_fresh:
        staleness_ms = believed.staleness_ms
    if _occupancy(site) >= 1:
        queue += believed.saturated_ms
    terms = dict(rtt=rtt, queue_ahead=queue, prefill=prefill, wake=wake, decode_crowding=crowding, doubt=staleness_ms)
    return (rtt + queue + prefill + wake + crowding + staleness_ms) + externality_ms, terms


def _mean_load(request: RouteRequest, sites: Sequence[BackendView]) -> float:
    loads = []
    for site in sites:
        model = site.model(request.model or "")
        if model is not None and model.prefill_tokens_per_s > 0:
            loads.append(min(1.0, model.arriving_tokens_per_s / model.prefill_tokens_per_s))
    return sum(loads) / len(loads) if loads else 0.0


def _occupancy(site: BackendView) -> float:
    if site.status is None or site.status.max_inflight <= 0:
        return 0.0
    return (site.status.inflight + site.pending_requests) / site.status.max_inflight
