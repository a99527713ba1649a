"""The oracle: a policy with information that no router could have."""

from collections.abc import Sequence

from load_tests.sim.site import SimSite
from load_tests.sim.traces import Turn
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class OraclePolicy:
    """A policy that picks the site that answers first, by its true queue, cache and round trip.

    It is greedy, so not a bound: it ignores the cost for later requests.
    """

    def __init__(self) -> None:
        self._sites: Sequence[SimSite] = ()
        self._number_of: dict[str, int] = {}
        self._rtt_s: Sequence[float] = ()
        self._turn: Turn | None = None
        self._now = 0.0

    def see(self, sites: Sequence[SimSite], rtt_s: Sequence[float], turn: Turn, now: float) -> None:
        """Record the truth before a decision. `rtt_s`: from the deciding router to each of `sites`."""
        if sites is not self._sites:
            self._sites, self._number_of = sites, {site.spec.name: i for i, site in enumerate(sites)}
        self._rtt_s, self._turn, self._now = rtt_s, turn, now

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        assert self._turn is not None
        turn = self._turn
        preferences = []
        for backend in eligible(request, backends):
            number = self._number_of[backend.name]
            site = self._sites[number]
            uncached = turn.prompt_tokens - site.matched_tokens(turn.prefixes, turn.prompt_tokens)
            rtt_ms = 1000 * self._rtt_s[number]
            terms = {
                "rtt": rtt_ms,
                "queue": 1000 * site.queued_tokens() / site.rate(),
                "prefill": 1000 * uncached / site.rate(),
                "wake": 1000 * site.wake_left_s(self._now),
            }
            preferences.append(Preference(backend, sum(terms.values()), terms, "true"))
        return sorted(preferences, key=lambda each: (each.cost_ms, each.backend.name))
