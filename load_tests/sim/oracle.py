"""Policies that are told the truth: what no router could know, for the oracle, or what a balancer beside its own sites knows at once."""

from collections.abc import Sequence

from load_tests.sim.site import SimSite
from load_tests.sim.traces import Turn
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class InformedPolicy:
    """Told before each decision what is true at that moment."""

    def __init__(self) -> None:
        self.sites: Sequence[SimSite] = ()
        self.by_name: dict[str, SimSite] = {}
        self.rtt_s: Sequence[float] = ()
        self.turn: Turn | None = None
        self.now = 0.0

    def see(self, sites: Sequence[SimSite], rtt_s: Sequence[float], turn: Turn, now: float) -> None:
        """`rtt_s`: from the deciding router to each of `sites`."""
        if sites is not self.sites:
            self.sites, self.by_name = sites, {site.spec.name: site for site in sites}
        self.rtt_s, self.turn, self.now = rtt_s, turn, now

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        raise NotImplementedError


class OraclePolicy(InformedPolicy):
    """The site that answers this request first, by its true queue, cache and round trip.

    Greedy, so no bound: it spares nobody who comes behind."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        assert self.turn is not None
        turn, number_of = self.turn, {site.spec.name: i for i, site in enumerate(self.sites)}
        preferences = []
        for backend in eligible(request, backends):
            site = self.by_name[backend.name]
            uncached = turn.prompt_tokens - site.matched_tokens(turn.prefixes, turn.prompt_tokens)
            rtt_ms = 1000 * self.rtt_s[number_of[backend.name]]
            terms = {
                "rtt": rtt_ms,
                "queue": 1000 * site.queued_tokens() / site.rate(),
                "prefill": 1000 * uncached / site.rate(),
                "wake": 1000 * site.wake_left_s(self.now),
            }
            preferences.append(Preference(backend, sum(terms.values()), terms, "true"))
        return sorted(preferences, key=lambda each: (each.cost_ms, each.backend.name))
