"""The round trip between the router and a site: estimated by geography, then measured by probes."""

from pilotlight.edge_router.routing.geo import distance_km
from pilotlight.wire.hop.status import Place

FIBRE_KM_PER_MS = 204.0  # light in glass: c / 1.468
DETOUR = 2.1  # length of real network paths over the straight distance; most pairs are between 1.3 and 2.5
FLOOR_MS = 0.3

# A probe can be delayed (a busy event loop, a scheduler) but never hastened, so a shorter time is believed at once and a longer one slowly:
# one probe that took 50 ms too long moves the estimate by 2.5 ms, and a path that really became longer is 90 % learnt after 45 probes.
FALL_WEIGHT = 0.5
RISE_WEIGHT = 0.05


def seed_rtt_ms(a: Place, b: Place) -> float:
    """Estimate the round trip between two places, in ms, until it has been measured."""
    return max(FLOOR_MS, 2 * distance_km(a, b) / FIBRE_KM_PER_MS * DETOUR)


class RoundTrip:
    """An exponentially weighted moving average with one weight for falling and one for rising."""

    def __init__(self, seed_ms: float) -> None:
        self.seed_ms = seed_ms
        self.ms = seed_ms
        self.is_measured = False

    def observe(self, sample_ms: float) -> None:
        if not self.is_measured:
            self.ms, self.is_measured = sample_ms, True
            return
        weight = FALL_WEIGHT if sample_ms < self.ms else RISE_WEIGHT
        self.ms += weight * (sample_ms - self.ms)
