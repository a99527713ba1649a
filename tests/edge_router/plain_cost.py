"""The cost policy's formula, written again site by site without optimisation: the fast form must give equal bits."""

from collections.abc import Sequence

from pilotlight.edge_router.backends.rtt import seed_rtt_ms
from pilotlight.edge_router.routing.cost import Assumptions
from pilotlight.edge_router.routing.views import BackendView, RouteRequest, eligible


def plain_costs(
    request: RouteRequest, backends: Sequence[BackendView]
) -> dict[str, tuple[float, float, dict[str, float]]]:
    """Return for each site the losses of other requests, by waiting and by lost cache, and the terms of the cost."""
    sites = eligible(request, backends)
    return {site.name: _price(request, site, sites) for site in sites}


def plain_scores(request: RouteRequest, backends: Sequence[BackendView]) -> dict[str, float]:
    """Return the score of each site."""
    plain, believed = plain_costs(request, backends), Assumptions()
    costs = {name: sum(terms.values()) for name, (_, _, terms) in plain.items()}
    least, usual = min(costs.values(), default=0.0), _usual(request, eligible(request, backends))
    over = least / usual if usual else 0.0
    longest = believed.delay_share * least / (1 + over * over)
    longest_for_a_cache = believed.repeat_share * least / (1 + over)

    def bounded(lost: float, most: float) -> float:
        return lost * most / (lost + most) if lost else 0.0

    return {
        name: costs[name] + bounded(delay, longest) + bounded(repeat, longest_for_a_cache)
        for name, (delay, repeat, _) in plain.items()
    }


def _price(
    request: RouteRequest, site: BackendView, others: Sequence[BackendView]
) -> tuple[float, float, dict[str, float]]:
    believed, status = Assumptions(), site.status
    model = site.model(request.model) if request.model is not None else None
    served = [found for other in others if (found := other.model(request.model or "")) is not None]
    tokens = [1000 / each.prefill_tokens_per_s for each in served if each.prefill_tokens_per_s > 0]
    steps = [1000 / each.decode_tokens_per_s for each in served if each.decode_tokens_per_s > 0]
    typical_ms = sum(tokens) / len(tokens) if tokens else 1000 / believed.prefill_tokens_per_s
    rate = model.prefill_tokens_per_s if model is not None else 0.0
    ms = 1000 / rate if rate > 0 else typical_ms
    rtt = site.rtt_ms
    if request.client is not None:
        rtt = seed_rtt_ms(request.client, site.place) + max(0.0, site.rtt_ms - site.seed_rtt_ms)
    prefill = reading = queue = wake = step = doubt = delay = repeat = 0.0
    if request.model is not None and (model is not None or status is None):
        cached = site.cached_tokens(request)
        most = max(other.cached_tokens(request) for other in others)
        holders = sum(2 * other.cached_tokens(request) >= most for other in others)
        weight = _network_load(request, others) * believed.repeat_weight / (holders * holders)
        if model is not None and model.kv_store and model.kv_store_tokens_per_s > 1000 / ms:
            stored = [
                other.cached_tokens(request)
                for other in others
                if (same := other.model(request.model)) is not None and same.kv_store == model.kv_store
            ]
            read = max(stored, default=cached) - cached
            reading, cached = read * 1000 / model.kv_store_tokens_per_s, cached + read
        prefill = (request.prompt_tokens - cached) * ms
        repeat = weight * max(0, most - cached) * ms
        queue = max(site.pending_tokens, site.unanswered_tokens) * ms
        if model is not None:
            load = min(believed.most_load, model.arriving_tokens_per_s * ms / 1000)
            sent = site.pending_tokens * ms
            age = max(0.0, request.now_s - site.status_at_s) * 1000
            since = max(0.0, request.now_s - site.pending_since_s) * 1000
            left, lasted = 0.0, age
            if model.residency != "device":
                left = model.wake_ms if model.wake_ms > 0 else believed.wake_ms
                if model.residency == "loading":
                    left = left * (1 - min(1.0, max(0.0, model.loaded))) - age
                elif site.pending_requests:
                    left -= since
                lasted = max(0.0, -left)
            wake = max(0.0, left)
            work = model.queued_tokens * ms + sent
            queue = max(0.0, work - lasted * (1 - load), sent - since, site.unanswered_tokens * ms)
            step = sum(steps) / len(steps) if steps else 0.0
            step = 1000 / model.decode_tokens_per_s if model.decode_tokens_per_s > 0 else step
            delay = prefill * (model.arriving_per_s * (queue + wake + prefill / 2) / 1000 / (1 - load))
        if not site.status_is_fresh or status is None:
            doubt = believed.unsaid_ms + believed.unsaid_queue_tokens * ms
    elif not site.status_is_fresh:
        doubt = believed.unsaid_ms
    full = believed.full_ms if _occupancy(site) >= 1 else 0.0
    terms = dict(rtt=rtt, queue_ahead=queue, prefill=prefill + reading, wake=wake, decode_step=step, full=full)
    is_home = request.home is not None and request.home.site == site.name
    late = site.proven_lateness_ms if is_home else site.lateness_ms
    return delay, repeat, {**terms, "doubt": doubt, "lateness": late}


def _network_load(request: RouteRequest, sites: Sequence[BackendView]) -> float:
    known = [model for site in sites if (model := site.model(request.model or "")) is not None]
    able = sum(model.prefill_tokens_per_s for model in known)
    return sum(min(model.arriving_tokens_per_s, model.prefill_tokens_per_s) for model in known) / able if able else 0.0


def _usual(request: RouteRequest, sites: Sequence[BackendView]) -> float:
    """Return the usual time of a request in queue and prefill, in ms."""
    known = [model for site in sites if (model := site.model(request.model or "")) is not None]
    known = [model for model in known if model.prefill_tokens_per_s > 0]
    come = sum(model.arriving_per_s for model in known)
    waited = sum(
        1000 * (each.arriving_per_s * each.queued_tokens + each.arriving_tokens_per_s) / each.prefill_tokens_per_s
        for each in known
    )
    return waited / come if come else 0.0


def _occupancy(site: BackendView) -> float:
    if site.status is None or site.status.max_inflight <= 0:
        return 0.0
    return (site.status.inflight + site.pending_requests) / site.status.max_inflight
