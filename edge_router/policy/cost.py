"""The policy: predict, in milliseconds, how long each site needs to answer, and take the site that answers first.

    cost = rtt + queue_ahead + prefill(uncached tokens) + wake(model) + decode_crowding + staleness

Each term comes from what the site published, corrected by what this router has sent there and by what the site has done since. Staleness is what a
site costs because nobody knows: a stale or silent one pays it, and the decision's header shows it (as `doubt`). Sites are compared by the cost plus
its externality: what the request would cost those who come behind it, more for tokens that another site holds and this one would compute again, by
how busy the network is. Differences too small to trust do not move a conversation away from its cache, nor do they send every new conversation to
one of several equal sites: among equals the home wins, then rendezvous hashing.

What was published is a second old when it is used, and other routers have used it, too. So each preference carries the queue up to which it is one:
a site that has a longer one declines at once, says how long it is, and the request is ranked anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_router.placement import placement_order
from edge_router.policy import BackendView, Preference, RouteRequest, eligible
from edge_router.rtt import seed_rtt_ms
from wire.status import ModelStatus


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the policy believes where nobody has measured, and what it holds to be equal."""

    prefill_tokens_per_s: float = 2000.0  # 0.5 ms a token; a 32B on a datacentre GPU needs about 0.37
    wake_ms: float = 5000.0  # a model that must first be read from disk
    queued_tokens: int = 1024  # at a site that has not said lately
    staleness_ms: float = 150.0  # what else such a site may hide
    saturated_ms: float = 10_000.0  # a site without a free permit would refuse: nearly the last resort
    reach_ms: float = 10.0  # within measurement noise, and below what a reader notices
    stickiness_ms: float = 50.0  # on top of that, for a client that named its session and so asked to stay
    unseen_s: float = (
        0.2  # of the work that reaches an average site: so much may have come since it published, for all we know
    )
    busiest: float = 0.9  # of a site's time, at most, is taken to be prefill's: waiting grows with 1 / (1 - share), and averages are never exact
    # What a site computes again though another holds it counts so many times its prefill, times the network's load (some 0.2 on the day's mean of a
    # heavy one): the prefill is certain and the queue that it avoids is not, and each further holder leaves others less cache. On the
    # tuning seeds, chat and burst at heavy load: without it 92 and 90 % of what an infinite cache would find is found, at p95s of 804 and 1,120 ms;
    # with it 97 and 96 % at 803 and 888 ms; a conversation that never moves finds 99 and 98 % at 2,259 and 3,312 ms (crashes take the rest).
    repeat: float = 16.0
    repeat_max_ms: float = (
        3000.0  # times the load, too: no client waits longer for others' sake, and a hot prefix spreads
    )
    queue_slack_ms: float = (
        150.0  # a queue longer by less than this is not left for another: that costs a round trip or two
    )


class Priced(NamedTuple):
    score: float  # what sites are compared by: the cost, and what others lose by it
    cost_ms: float  # what the client waits
    backend: BackendView
    terms: dict[str, float]


class CostPolicy:
    def __init__(self, assumptions: Assumptions | None = None) -> None:
        self.assumptions = assumptions or Assumptions()

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        candidates = eligible(request, backends)
        wanted = request.model
        if len(candidates) == 1:
            only = candidates[0]
            held = only.cached_tokens(request)
            model = only.model(wanted) if wanted is not None else None
            priced = self.price(request, only, model, held, held, 0.0)  # nobody to be compared with: no externality
            return [Preference(only, priced.cost_ms, priced.terms, "only")]
        models = [backend.model(wanted) if wanted is not None else None for backend in candidates]
        cached = [backend.cached_tokens(request) for backend in candidates]
        most_cached = max(cached, default=0)
        load = _mean_load(models)
        prices = [
            self.price(request, backend, model, held, most_cached, load)
            for backend, model, held in zip(candidates, models, cached, strict=True)
        ]
        prices.sort(key=_cheapest_first)
        order, reason = self._among_equals(request, prices, load)
        preferences = [Preference(each.backend, each.cost_ms, each.terms, "spill") for each in order]
        if preferences:
            first = order[0]
            preferences[0] = Preference(
                first.backend, first.cost_ms, first.terms, reason, self._max_queue_ms(first, prices)
            )
        return preferences

    def _max_queue_ms(self, first: Priced, priced: list[Priced]) -> float | None:
        """The predicted queue, and what the next best site costs more."""
        other = next((each for each in priced if each is not first), None)
        if other is None:
            return None
        return first.terms["queue_ahead"] + max(0.0, other.score - first.score) + self.assumptions.queue_slack_ms

    def price(
        self,
        request: RouteRequest,
        backend: BackendView,
        model: ModelStatus | None,
        cached: int,
        most_cached: int,
        mean_load: float,
    ) -> Priced:
        """`cached`: tokens of this prompt that the site holds, `most_cached`: that whichever site holds most of it does; `mean_load`: share of the
        sites' time that prefill takes."""
        believed, status = self.assumptions, backend.status
        rate = (
            model.prefill_tokens_per_s if model is not None else 0.0
        )  # it changes slowly: a stale one is better than a guess
        ms_per_token = 1000 / (rate if rate > 0 else believed.prefill_tokens_per_s)
        rtt = _rtt_ms(request, backend)
        occupancy = _occupancy(backend)
        prefill = queue = wake = crowding = staleness_ms = externality_ms = 0.0
        if request.model is not None and (model is not None or status is None):
            prefill = (request.prompt_tokens - cached) * ms_per_token
            repeated = max(0, most_cached - cached) * ms_per_token
            externality_ms = mean_load * min(believed.repeat_max_ms, believed.repeat * repeated)
            if model is not None:
                load = min(believed.busiest, model.arriving_tokens_per_s * ms_per_token / 1000)
                queue = self._queue_ms(request, backend, model, ms_per_token, load)
                wake = self._wake_ms(model)
                crowding = _crowding(model, max(occupancy, _kv_utilisation(model)))
                if model.arriving_per_s:
                    externality_ms += prefill * _followers(model, queue + wake + prefill / 2, load)
            else:
                queue = backend.pending_tokens * ms_per_token
            if (
                not backend.status_is_fresh or status is None
            ):  # on top of what it said last: silence makes no site look better
                staleness_ms = believed.staleness_ms + believed.queued_tokens * ms_per_token
        elif not backend.status_is_fresh:
            staleness_ms = believed.staleness_ms
        if occupancy >= 1:
            queue += believed.saturated_ms
        cost = rtt + queue + prefill + wake + crowding + staleness_ms
        terms = {
            "rtt": rtt,
            "queue_ahead": queue,
            "prefill": prefill,
            "wake": wake,
            "decode_crowding": crowding,
            "doubt": staleness_ms,
        }
        return Priced(cost + externality_ms, cost, backend, terms)

    def _queue_ms(
        self, request: RouteRequest, backend: BackendView, model: ModelStatus, ms_per_token: float, load: float
    ) -> float:
        """What is left of the published queue and of what was sent since, when this request arrives. The site has worked meanwhile; others have
        sent to it as well, at the rate that it publishes."""
        sent = backend.pending_tokens * ms_per_token
        age = max(0.0, request.now_s - backend.status_at_s) * 1000
        since = max(0.0, request.now_s - backend.pending_since_s) * 1000
        work = model.queued_tokens * ms_per_token + sent
        return max(0.0, work - age * (1 - load), sent - since)

    def _among_equals(self, request: RouteRequest, priced: list[Priced], load: float) -> tuple[list[Priced], str]:
        """`priced` cheapest first -> the order to try, and which branch of the policy chose its first."""
        if len(priced) <= 1:
            return priced, "only"
        cheapest, home, reason = priced[0].score, request.home, "cheapest"
        # Work that may have come to a site since it published: the more, the less being cheapest means. In an idle network there is none.
        reach = max(self.assumptions.reach_ms, 1000 * self.assumptions.unseen_s * load)
        if home is not None:
            stickiness_ms = reach + self.assumptions.stickiness_ms if home.by_name else reach
            at_home = next((each for each in priced if each.backend.name == home.site), None)
            if at_home is not None and at_home.score <= cheapest + stickiness_ms:
                return [at_home, *(each for each in priced if each is not at_home)], "home"
            reason = "home_too_dear" if at_home is not None else "home_lost"
        near = 1
        while near < len(priced) and priced[near].score <= cheapest + reach:
            near += 1
        if request.placement_key is None or near == 1:
            return priced, reason
        mean = sum(_occupancy(each.backend) for each in priced) / len(priced)
        placed = placement_order(request.placement_key, [each.backend for each in priced[:near]], mean)
        by_name = {each.backend.name: each for each in priced[:near]}
        return [
            *(by_name[backend.name] for backend in placed),
            *priced[near:],
        ], "placed" if reason == "cheapest" else reason

    def _wake_ms(self, model: ModelStatus) -> float:
        if model.residency == "device":
            return 0.0
        return model.wake_ms if model.wake_ms > 0 else self.assumptions.wake_ms


def _mean_load(models: Sequence[ModelStatus | None]) -> float:
    """Share of the time of the sites that have the model which the prefill of what reaches them takes."""
    loads = [
        min(1.0, model.arriving_tokens_per_s / model.prefill_tokens_per_s)
        for model in models
        if model is not None and model.prefill_tokens_per_s > 0
    ]
    return sum(loads) / len(loads) if loads else 0.0


def _cheapest_first(priced: Priced) -> tuple[float, str]:
    return priced.score, priced.backend.name


def _rtt_ms(request: RouteRequest, backend: BackendView) -> float:
    """From the router, or from where the client is said to stand: then geography decides, plus what the router measures above its own estimate
    (a site that answers late is late for everybody)."""
    if request.client is None:
        return backend.rtt_ms
    return seed_rtt_ms(request.client, backend.place) + max(0.0, backend.rtt_ms - backend.seed_rtt_ms)


def _occupancy(backend: BackendView) -> float:
    """Share of the permits in use as the site said last, and what was sent since."""
    status = backend.status
    return (
        (status.inflight + backend.pending_requests) / status.max_inflight
        if status is not None and status.max_inflight > 0
        else 0.0
    )


def _kv_utilisation(model: ModelStatus) -> float:
    """Of sequences at work: what an idle model keeps is cache, which gives way."""
    if model.kv_blocks_total <= 0 or model.running + model.waiting == 0:
        return 0.0
    return 1 - model.kv_blocks_free / model.kv_blocks_total


def _followers(model: ModelStatus, ahead_ms: float, load: float) -> float:
    """How many requests will come to the site before it is idle again, when it has work for so long: each waits longer by whatever is added to it.
    A busy period that begins with work w lasts w / (1 - load) in any queue that serves in the order of arrival."""
    return model.arriving_per_s * ahead_ms / 1000 / (1 - load)


def _crowding(model: ModelStatus, utilisation: float) -> float:
    """The first decode step, which grows beyond bounds as the site fills: there, sequences are preempted."""
    k = min(max(utilisation, 0.0), 0.95)
    return 1000 / model.decode_tokens_per_s / (1 - k) if model.decode_tokens_per_s > 0 else 0.0
