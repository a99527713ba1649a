"""The cost policy: predict when each site would answer, and choose the site that costs least.

Costs are milliseconds, for the client and for others.

cost  = rtt + queue_ahead + prefill(uncached tokens) + wake(model) + decode_step + full + doubt + lateness
score = cost + bounded(delay, most_delay) + bounded(repeat, most_repeat)
bounded(x, most) = x * most / (x + most)

The cost is the client's wait, estimated from the site's status, the requests that this router sent since, and the time that has passed. `doubt` is
added for a site that has not published lately, `lateness` for one whose answers come later than predicted (edge_router/backends/lateness.py).

`delay` and `repeat` are losses of other requests: later requests wait for this prefill, and tokens that another site holds are computed again, which
costs time and cache. Each is bounded, because a long prompt delays others by minutes and would otherwise be sent to the slowest site.

`least` is the wait at the site that would answer first, `usual` the wait of requests in the network now:

most_delay  = delay_share * least / (1 + (least / usual)**2)
most_repeat = repeat_share * least / (1 + least / usual)

A client that waits less than usual gives way to later requests by at most delay_share times its own wait. A client in the tail, which waits long
anyway, hardly gives way: its own wait is certain, and later requests can still go elsewhere. To use its cache, it waits at most repeat_share times
the usual wait longer.

Tokens that a site lacks but shares through a KV store are read from there if that is faster than computing; `prefill` includes both.

Differences too small to trust do not move a conversation from its cache, and do not send all new conversations to one of several equal sites: among
equals the home wins, then rendezvous hashing. The saving that justifies a move grows with the prefill that it repeats, and one late answer moves
nothing (`proven_lateness_ms`). A site that has not measured itself is assumed to be as fast as those that have.

A status is a second old when it is used, and other routers have used it too. So each preference carries the longest acceptable queue: a site with a
longer one declines at once, reports its length, and the request is ranked again. The second and third preference carry it as well, because all
requests of a site move at once when it is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter

import msgspec

from pilotlight.edge_router.backends.rtt import seed_rtt_ms
from pilotlight.edge_router.routing.placement import placement_order
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible
from pilotlight.wire.hop.status import ModelStatus

# Only some sites are priced: pricing takes 4 us for each, and a network may have thousands.
MAX_NEAR = 16  # sites priced because they are near and idle; a request asks at most five (three tries, two declines) before it is ranked again
MAX_HOLDERS = 8  # sites priced because they hold a part of the prompt, those with the longest part first
SEARCHED_DIGESTS = 2  # the prompt's longest digests, which are looked up at all sites; the others only at priced sites


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The policy's assumptions for unmeasured values, its tolerances, and the weight of others' delays."""

    prefill_tokens_per_s: float = 2000.0  # 0.5 ms a token; a 32B model on a datacentre GPU takes 0.37 ms
    wake_ms: float = 5000.0  # time to wake a model that must first be read from disk
    unsaid_queue_tokens: int = 1024  # assumed hidden queue of a site that has not published lately
    unsaid_ms: float = 150.0  # additional assumed wait at such a site
    # cost of a site without a free permit, which would refuse: such a site is nearly the last resort
    full_ms: float = 10_000.0
    reach_ms: float = 10.0  # smaller differences are measurement noise, and a reader does not notice them
    # A move must save more if it repeats a longer prefill, because predictions are noisy. This is the limit of that additional saving.
    most_noise_ms: float = 250.0
    stickiness_ms: float = 50.0  # additional cost of leaving a site, for a client that named its session
    unseen_s: float = 0.2  # work that may have reached a site since its status: this many seconds of it, multiplied by the network's load
    most_load: float = 0.9  # largest load in predictions: waiting grows with 1 / (1 - load), and averages are not exact
    # If a site computes tokens again that another site holds, their prefill counts this many times, multiplied by the network's load (0.2 on the
    # daily mean of a heavily used network). The prefill is certain and the avoided queue is not, and each further holder leaves less cache to others.
    # The weight is divided by the square of the number of holders: a prefix at several sites is shared by many conversations, so one more copy will
    # be used.
    repeat_weight: float = 16.0
    # limit of a client's additional wait for the sake of later requests, as a multiple of the least cost
    delay_share: float = 1.0
    # limit of a client's additional wait to use its cache, as a multiple of the least or the usual cost, whichever is smaller
    repeat_share: float = 2.0
    # excess of a queue over its limit at which a site does not decline yet: asking another site costs a round trip or two
    queue_slack_ms: float = 150.0


class Priced(msgspec.Struct, frozen=True):
    cost_ms: float  # the client's wait
    delay_ms: float  # the delay of later requests
    repeat_ms: float  # the cost of computing again tokens that another site holds
    backend: BackendView
    terms: dict[str, float]
    cached: int  # tokens of the prompt that need no prefill
    ms_per_token: float  # prefill time per token


class Scored(msgspec.Struct, frozen=True):
    score_ms: float  # the value that orders the sites
    cost_ms: float
    backend: BackendView
    terms: dict[str, float]
    cached: int
    ms_per_token: float


class NetworkRates(msgspec.Struct, frozen=True):
    """The load of all sites, and the average times of those that have measured themselves.
    The times are used for a site that has just started, which has no rates. If such a site counted as faster than the others, each conversation would
    leave the site of its first turn."""

    load: float  # share of all sites' time that the prefill of arriving requests for a model takes
    token_ms: float  # prefill time per token
    step_ms: float  # time of a decode step


class CostPolicy:
    def __init__(self, assumptions: Assumptions | None = None) -> None:
        self.assumptions = assumptions or Assumptions()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        candidates = eligible(request, backends)
        if len(candidates) > MAX_NEAR + MAX_HOLDERS:
            candidates = shortlist(request, candidates)
        wanted = request.model
        models = [backend.model(wanted) if wanted is not None else None for backend in candidates]
        cached = [backend.cached_tokens(request) for backend in candidates]
        most_cached, rates = max(cached, default=0), _network_rates(models, self.assumptions.prefill_tokens_per_s)
        holders = sum([2 * held >= most_cached for held in cached])
        repeat_weight = rates.load * self.assumptions.repeat_weight / (holders * holders or 1)
        stored = _stored_tokens(models, cached)
        priced = [
            self.price(
                request,
                backend,
                model,
                held,
                most_cached,
                repeat_weight,
                _readable(model, held, stored),
                rates,
            )
            for backend, model, held in zip(candidates, models, cached, strict=True)
        ]
        if len(priced) == 1:
            return [Preference(priced[0].backend, priced[0].cost_ms, priced[0].terms, "only")]
        scored = self.scored(priced, _usual_ms(models))
        order, reason = self._among_equals(request, scored, rates.load)
        return self._preferences(order, scored, reason)

    def _preferences(self, order: list[Scored], scored: list[Scored], reason: str) -> list[Preference]:
        """Return the preferences, each but the last with its longest acceptable queue.

        That limit is the predicted queue plus the additional cost of the next best site.
        """
        if not order:
            return []
        first = order[0]
        others = [next(each for each in scored if each is not first), *order[2:]] if len(order) > 1 else []
        slack_ms = self.assumptions.queue_slack_ms
        preferences = [
            Preference(
                each.backend,
                each.cost_ms,
                each.terms,
                reason if each is first else "spill",
                each.terms["queue_ahead"] + max(0.0, other.score_ms - each.score_ms) + slack_ms,
            )
            for each, other in zip(order, others, strict=False)
        ]
        last = order[-1]
        return [*preferences, Preference(last.backend, last.cost_ms, last.terms, "spill" if others else reason)]

    def scored(self, priced: list[Priced], usual_ms: float) -> list[Scored]:
        """Return the sites with their scores, best first. `usual_ms` is the usual wait; 0 if unknown."""
        least_ms = min([each.cost_ms for each in priced], default=0.0)
        over = least_ms / usual_ms if usual_ms else 0.0
        most_delay_ms = self.assumptions.delay_share * least_ms / (1 + over * over)
        most_repeat_ms = self.assumptions.repeat_share * least_ms / (1 + over)
        scored = [
            Scored(
                each.cost_ms + _bounded(each.delay_ms, most_delay_ms) + _bounded(each.repeat_ms, most_repeat_ms),
                each.cost_ms,
                each.backend,
                each.terms,
                each.cached,
                each.ms_per_token,
            )
            for each in priced
        ]
        scored.sort(key=_best_first)
        return scored

    def price(
        self,
        request: RouteRequest,
        backend: BackendView,
        model: ModelStatus | None,
        cached: int,
        most_cached: int,
        repeat_weight: float,
        readable: int,
        rates: "NetworkRates",
    ) -> Priced:
        """Predict the costs of one site.

        `cached`: tokens of this prompt that the site holds. `most_cached`: the same for the site that holds most. `readable`: tokens that the site
        could read from its KV store besides. `repeat_weight`: how many times the prefill of tokens that another site holds counts as lost to others.
        `rates`: they include the assumptions for a site that has not measured itself.
        """
        believed, status = self.assumptions, backend.status
        # A rate changes slowly, so an old one is better than an assumption.
        rate = model.prefill_tokens_per_s if model is not None else 0.0
        ms_per_token = 1000 / rate if rate > 0 else rates.token_ms
        rtt_ms = _rtt_ms(request, backend)
        prefill_ms = read_ms = queue_ms = wake_ms = step_ms = doubt_ms = delay_ms = repeat_ms = 0.0
        if request.model is not None and (model is not None or status is None):
            if model is not None and readable and model.kv_store_tokens_per_s > 1000 / ms_per_token:
                read_ms = readable * 1000 / model.kv_store_tokens_per_s
                cached += readable
            prefill_ms = (request.prompt_tokens - cached) * ms_per_token
            repeat_ms = repeat_weight * max(0, most_cached - cached) * ms_per_token
            if model is not None:
                load = min(believed.most_load, model.arriving_tokens_per_s * ms_per_token / 1000)
                wake_ms, served_ms = self._wake_ms(request, backend, model)
                queue_ms = _queue_ms(request, backend, model, ms_per_token, served_ms * (1 - load))
                step_ms = 1000 / model.decode_tokens_per_s if model.decode_tokens_per_s > 0 else rates.step_ms
                if model.arriving_per_s:
                    delay_ms = prefill_ms * _followers(model, queue_ms + wake_ms + prefill_ms / 2, load)
            else:
                queue_ms = max(backend.pending_tokens, backend.unanswered_tokens) * ms_per_token
            if not backend.status_is_fresh or status is None:
                # The assumed queue is added to that of the last status, so that silence makes no site look better.
                doubt_ms = believed.unsaid_ms + believed.unsaid_queue_tokens * ms_per_token
        elif not backend.status_is_fresh:
            doubt_ms = believed.unsaid_ms
        full_ms = believed.full_ms if _occupancy(backend) >= 1 else 0.0
        is_home = request.home is not None and request.home.site == backend.name
        lateness_ms = backend.proven_lateness_ms if is_home else backend.lateness_ms
        terms = {
            "rtt": rtt_ms,
            "queue_ahead": queue_ms,
            "prefill": prefill_ms + read_ms,
            "wake": wake_ms,
            "decode_step": step_ms,
            "full": full_ms,
            "doubt": doubt_ms,
            "lateness": lateness_ms,
        }
        cost_ms = rtt_ms + queue_ms + terms["prefill"] + wake_ms + step_ms + full_ms + doubt_ms + lateness_ms
        return Priced(cost_ms, delay_ms, repeat_ms, backend, terms, cached, ms_per_token)

    def _wake_ms(self, request: RouteRequest, backend: BackendView, model: ModelStatus) -> tuple[float, float]:
        """Return the remaining wake time of a model, and for how long its site has computed since its status."""
        age_ms = max(0.0, request.now_s - backend.status_at_s) * 1000
        if model.residency == "device":
            return 0.0, age_ms
        whole_ms = model.wake_ms if model.wake_ms > 0 else self.assumptions.wake_ms
        if model.residency == "loading":
            left_ms = whole_ms * (1 - min(1.0, max(0.0, model.loaded))) - age_ms
        elif backend.pending_requests:  # a request that this router has sent wakes the model
            left_ms = whole_ms - max(0.0, request.now_s - backend.pending_since_s) * 1000
        else:
            left_ms = whole_ms
        return max(0.0, left_ms), max(0.0, -left_ms)

    def _among_equals(
        self, request: RouteRequest, scored: list[Scored], network_load: float
    ) -> tuple[list[Scored], str]:
        """Return the scored sites in the order to try, and the policy's reason for the first.
        `scored` has the cheapest first."""
        if not scored:
            return scored, "only"
        least_ms, home, reason = scored[0].score_ms, request.home, "cheapest"
        # Time of work that may have reached a site since its status. With more of it, small price differences mean less; in an idle network it is
        # zero.
        reach_ms = max(self.assumptions.reach_ms, 1000 * self.assumptions.unseen_s * network_load)
        if home is not None:
            stickiness_ms = reach_ms + self.assumptions.stickiness_ms if home.by_name else reach_ms
            at_home = next((each for each in scored if each.backend.name == home.site), None)
            if at_home is not None:
                repeated_ms = (at_home.cached - scored[0].cached) * scored[0].ms_per_token
                stickiness_ms += _bounded(repeated_ms, self.assumptions.most_noise_ms)
            if at_home is not None and at_home.score_ms <= least_ms + stickiness_ms:
                return [at_home, *(each for each in scored if each is not at_home)], "home"
            reason = "home_too_dear" if at_home is not None else "home_lost"
        near = 1
        while near < len(scored) and scored[near].score_ms <= least_ms + reach_ms:
            near += 1
        if request.placement_key is None or near == 1:
            return scored, reason
        mean = sum(_occupancy(each.backend) for each in scored) / len(scored)
        placed = placement_order(request.placement_key, [each.backend for each in scored[:near]], mean)
        by_name = {each.backend.name: each for each in scored[:near]}
        return [
            *(by_name[backend.name] for backend in placed),
            *scored[near:],
        ], "placed" if reason == "cheapest" else reason


def shortlist(request: RouteRequest, backends: Sequence[BackendView]) -> list[BackendView]:
    """Return the sites that are worth pricing, in their order, at most MAX_NEAR + MAX_HOLDERS.

    These are the sites that would answer first by round trip and published queue, and those that hold a part of the prompt. A site holds a part if
    this router sent earlier turns there, or if it publishes one of the longest prefixes.
    """
    if request.client is None:
        waits_ms = [backend.rtt_ms + backend.backlog_ms for backend in backends]
    else:
        waits_ms = [seed_rtt_ms(request.client, backend.place) + backend.backlog_ms for backend in backends]
    numbers = range(len(backends))
    kept = set(nsmallest(MAX_NEAR, numbers, key=waits_ms.__getitem__))
    held = {name: tokens for name, tokens in request.held.items() if tokens > 0}
    if request.home is not None:
        held[request.home.site] = request.prompt_tokens + 1  # the conversation's home comes before any other holder
    holders = [(held[backend.name], i) for i, backend in enumerate(backends) if backend.name in held]
    for digest, tokens in request.digests[:SEARCHED_DIGESTS]:
        holders += [(tokens, i) for i, backend in enumerate(backends) if digest in backend.prefixes]
    holders.sort(key=lambda pair: (-pair[0], waits_ms[pair[1]]))
    kept.update(map(itemgetter(1), holders[:MAX_HOLDERS]))
    return [backends[number] for number in sorted(kept)]


def _network_rates(models: Sequence[ModelStatus | None], assumed_tokens_per_s: float) -> NetworkRates:
    """Return the rates of the sites with a model. In the load, a fast site counts for more.
    `assumed_tokens_per_s` is assumed for the prefill if no site has measured its own."""
    arriving = able = 0.0
    tokens_ms: list[float] = []
    steps_ms: list[float] = []
    for model in models:
        if model is None:
            continue
        if (rate := model.prefill_tokens_per_s) > 0:
            arriving += min(model.arriving_tokens_per_s, rate)
            able += rate
            tokens_ms.append(1000 / rate)
        if model.decode_tokens_per_s > 0:
            steps_ms.append(1000 / model.decode_tokens_per_s)
    return NetworkRates(
        arriving / able if able else 0.0,
        sum(tokens_ms) / len(tokens_ms) if tokens_ms else 1000 / assumed_tokens_per_s,
        sum(steps_ms) / len(steps_ms) if steps_ms else 0.0,
    )


def _usual_ms(models: Sequence[ModelStatus | None]) -> float:
    """Return the mean wait of a request in a queue and for its prefill, over all sites; 0 if none arrive.

    Requests really wait less, because they avoid long queues. But if long queues did not count, clients in the tail would leave their caches too
    easily (docs/measurements/routing.md).
    """
    requests_per_s = waited_ms_per_s = 0.0
    for model in models:
        if model is not None and model.prefill_tokens_per_s > 0:
            requests_per_s += model.arriving_per_s
            waited_tokens = model.arriving_per_s * model.queued_tokens + model.arriving_tokens_per_s
            waited_ms_per_s += 1000 * waited_tokens / model.prefill_tokens_per_s
    return waited_ms_per_s / requests_per_s if requests_per_s > 0 else 0.0


def _stored_tokens(models: Sequence[ModelStatus | None], cached: Sequence[int]) -> dict[str, int]:
    """Return how many tokens of the prompt each KV store holds.

    A store holds as many as any of its sites, because sites write the blocks that they compute to it.
    """
    stored: dict[str, int] = {}
    for model, held in zip(models, cached, strict=True):
        if held and model is not None and model.kv_store:
            stored[model.kv_store] = max(held, stored.get(model.kv_store, 0))
    return stored


def _readable(model: ModelStatus | None, cached: int, stored: Mapping[str, int]) -> int:
    """Return how many tokens of the prompt a site could read from its store.
    0 for a site without a store. `price` counts them only if reading them at the site's measured rate is faster than computing."""
    return max(0, stored.get(model.kv_store, 0) - cached) if model is not None and stored else 0


def _bounded(lost_ms: float, most_ms: float) -> float:
    return lost_ms * most_ms / (lost_ms + most_ms) if lost_ms > 0 else 0.0


def _best_first(scored: Scored) -> tuple[float, str]:
    return scored.score_ms, scored.backend.name


def _rtt_ms(request: RouteRequest, backend: BackendView) -> float:
    """Return the round trip from the router, or from the client's location if it is known.

    The latter is an estimate by distance, plus the difference between the router's own measurement and estimate, because a site's delay affects all
    clients.
    """
    if request.client is None:
        return backend.rtt_ms
    return seed_rtt_ms(request.client, backend.place) + max(0.0, backend.rtt_ms - backend.seed_rtt_ms)


def _queue_ms(
    request: RouteRequest, backend: BackendView, model: ModelStatus, ms_per_token: float, worked_off_ms: float
) -> float:
    """Return how long a request must wait for the queue of a site when it arrives there.

    The queue is the rest of the published one, and requests that came later. `worked_off_ms` is how much the site has shortened its queue since its
    status. Other routers have sent requests since then, too, at the rate that the site publishes. Requests that this router has just sent always
    count, and so do those after an unanswered one.
    """
    sent_ms = backend.pending_tokens * ms_per_token
    since_ms = max(0.0, request.now_s - backend.pending_since_s) * 1000
    work_ms = model.queued_tokens * ms_per_token + sent_ms
    return max(0.0, work_ms - worked_off_ms, sent_ms - since_ms, backend.unanswered_tokens * ms_per_token)


def _occupancy(backend: BackendView) -> float:
    """Return the share of permits in use, from the last status and the requests sent since."""
    status = backend.status
    return (
        (status.inflight + backend.pending_requests) / status.max_inflight
        if status is not None and status.max_inflight > 0
        else 0.0
    )


def _followers(model: ModelStatus, ahead_ms: float, load: float) -> float:
    """Return how many requests arrive before a site with `ahead_ms` of work is idle again.

    Each of them is delayed by added work. A busy period that starts with work w lasts w / (1 - load) in any queue that serves in order of arrival.
    """
    return model.arriving_per_s * ahead_ms / 1000 / (1 - load)
