"""A router of the simulation: the real Backend, SessionTable and policy, with a virtual clock.

Probes are applied at the router's next decision, in their order and with their delays.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from msgspec.structs import replace

from load_tests.sim.oracle import OraclePolicy
from load_tests.sim.site import MODEL, SimSite
from load_tests.sim.traces import Turn
from load_tests.sim.trouble import NONE, Trouble
from load_tests.sim.world import World
from pilotlight.edge_router.backends.backend import Backend, Ticket
from pilotlight.edge_router.backends.rtt import RoundTrip, seed_rtt_ms
from pilotlight.edge_router.backends.wake_hints import EVERY_S, sleeping_winner
from pilotlight.edge_router.requests.session import ConversationFingerprint, SessionTable
from pilotlight.edge_router.routing.views import Policy, Preference, RouteRequest
from pilotlight.sites.config import PlaceConfig
from pilotlight.sites.network import HealthConfig, SiteRef
from pilotlight.wire.hop.status import SiteStatus

HEALTH = HealthConfig()
SESSION_ENTRIES = 100_000
SESSION_TTL_S = 3600.0
KEPT_S = 2.0  # how long publications are kept: longer than any path's delay
JITTER = 0.05  # mean additional time of a probe, as a share of the path's round trip


class Publication(NamedTuple):
    at: float
    status: SiteStatus
    unchanged: SiteStatus  # the status for a router that has the current digests

    @classmethod
    def of(cls, at: float, status: SiteStatus) -> "Publication":
        models = tuple([replace(model, prefixes=b"") for model in status.models])
        return cls(at, status, replace(status, models=models, digests_since=status.digests))


class SimRouter:
    def __init__(
        self, number: int, world: World, sites: list[SimSite], policy: Policy, clock: Callable[[], float], trouble: Trouble = NONE,
        rtt_factors: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self.number = number
        self.world = world
        self.policy = policy
        self.sessions = SessionTable(SESSION_ENTRIES, SESSION_TTL_S, clock)
        here = world.routers[number]
        self.backends: list[Backend] = []
        for site in sites:
            place = site.spec.place
            ref = SiteRef(
                name=site.spec.name,
                url="http://127.0.0.1",
                place=PlaceConfig(city=place.city, latitude=place.latitude, longitude=place.longitude),
            )
            self.backends.append(Backend(ref, RoundTrip(seed_rtt_ms(here, place)), HEALTH, clock))
        self.index = {backend.name: i for i, backend in enumerate(self.backends)}
        self._sites = sites
        self._seen = [-1] * len(sites)  # per site, the sequence number of the newest applied status
        self._next_probe = [0.0] * len(sites)
        self._hinted_at = [float("-inf")] * len(sites)
        self._look_s = min(HEALTH.interval_s, trouble.publish_s) / 4  # four times as often as statuses change
        self._jitter = random.Random(f"jitter {number}")
        self._rtt_ms = [
            1000 * rtt * factor
            for rtt, factor in zip(world.rtt_s[number], rtt_factors or [1.0] * len(sites), strict=True)
        ]
        for backend, rtt_ms in zip(self.backends, self._rtt_ms, strict=True):
            backend.round_trip.observe(rtt_ms)

    def decide(
        self,
        conversation: ConversationFingerprint,
        turn: Turn,
        now: float,
        published: list[list[Publication]],
    ) -> tuple[RouteRequest, list[Preference]]:
        """Rank the sites for a request. `turn`: the true request, for the oracle."""
        self._catch_up(now, published)
        recall = self.sessions.recall(conversation)
        request = RouteRequest(
            MODEL,
            conversation.tokens,
            conversation.placement_key,
            recall.home,
            None,
            recall.held,
            conversation.short_digests,
            now,
        )
        if isinstance(self.policy, OraclePolicy):
            self.policy.see(self._sites, self.world.rtt_s[self.number], turn, now)
        preferences = self.policy.rank(request, [backend.view() for backend in self.backends])
        return request, preferences

    def hint(self, preferences: list[Preference], now: float) -> int | None:
        """Return the site whose sleeping model a router would wake with a hint now; None for no hint."""
        winner = sleeping_winner(MODEL, preferences)
        if winner is None or now - self._hinted_at[self.index[winner[0]]] < EVERY_S:
            return None
        self._hinted_at[self.index[winner[0]]] = now
        return self.index[winner[0]]

    def send(self, site: int, tokens: int, expected_ms: float) -> tuple[AbstractContextManager[Ticket], Ticket]:
        scope = self.backends[site].inflight(tokens, expected_ms=expected_ms)
        return scope, scope.__enter__()

    def reaches(self, site: int, now: float) -> bool:
        """Tell whether there is a path; the site at its end may still be down."""
        return not any(
            o.site == site and self.number in o.routers and o.begins <= now < o.ends for o in self.world.outages
        )

    def _catch_up(self, now: float, published: list[list[Publication]]) -> None:
        row = self.world.rtt_s[self.number]
        for i, backend in enumerate(self.backends):
            if now < self._next_probe[i]:
                continue
            self._next_probe[i] = now + self._look_s
            if not self._sites[i].is_up or not self.reaches(i, now):
                self._next_probe[i] = now + HEALTH.interval_s
                backend.failed("no answer")
                continue
            delay = row[i] / 2
            for publication in reversed(published[i]):
                if publication.at + delay <= now:
                    if publication.status.sequence != self._seen[i]:
                        self._seen[i] = publication.status.sequence
                        backend.round_trip.observe(self._rtt_ms[i] * (1 + self._jitter.expovariate(1 / JITTER)))
                        is_known = backend.published.digests == publication.status.digests
                        status = publication.unchanged if is_known else publication.status
                        backend.answered(status, publication.at - delay)
                    break
