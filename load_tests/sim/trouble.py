"""Further faults of a network, besides the crashes and the partition of every run.

A run has one of them, for the tables on robustness. It affects the site or region nearest to the router with the most traffic.
"""

import math
from dataclasses import dataclass
from random import Random

from load_tests.sim.site import Fault
from load_tests.sim.world import REGION_MS, Outage, World

FLAP_S = 6.0  # a flapping site is up for so long, then down for as long
LOST_S = 25.0


@dataclass(frozen=True, slots=True)
class Trouble:
    name: str = "none"
    fault: Fault = ""
    publish_s: float = 1.0  # seconds between a site's statuses
    moves: float = 0.02  # share of turns whose client has moved to another router, such as a phone in another network
    cache_share: float = 1.0  # share of the usual size of sites' caches
    rtt_error: float = 1.0  # measured round trips are wrong by up to this factor
    is_flapping: bool = False
    is_partitioned: bool = False  # a third of the routers cannot reach the site for half of the measured time
    is_region_lost: bool = False

    def outages(self, world: World, measured: tuple[float, float]) -> tuple[Outage, ...]:
        begin, end = measured
        first, middle, site = begin + 0.25 * (end - begin), (begin + end) / 2, hit_site(world)
        if self.is_flapping:
            times = math.floor((end - begin) / (2 * FLAP_S))
            return tuple(Outage(site, begin + (2 * i + 1) * FLAP_S, begin + (2 * i + 2) * FLAP_S) for i in range(times))
        if self.is_partitioned:
            return (Outage(site, first, first + (end - begin) / 2, frozenset(range(0, len(world.routers), 3))),)
        if self.is_region_lost:
            near = [i for i, rtt in enumerate(world.rtt_s[0]) if 1000 * rtt <= REGION_MS] or [site]
            return tuple(Outage(each, middle, middle + LOST_S) for each in near)
        return ()

    def rtt_factors(self, world: World, seed: int) -> tuple[tuple[float, ...], ...]:
        """Return the error factor of measured round trips, as [router][site]."""
        rng = Random(f"{seed} rtt error")
        most = math.log(self.rtt_error)
        return tuple(tuple(math.exp(rng.uniform(-most, most)) for _ in row) for row in world.rtt_s)


def hit_site(world: World) -> int:
    return world.region_of_router[0]


NONE = Trouble()
TROUBLES = {
    trouble.name: trouble
    for trouble in (
        NONE,
        Trouble("a site publishes no load and never declines", fault="says idle"),
        Trouble("a site claims to hold what others hold", fault="claims prefixes"),
        Trouble("a site is 8 times slower than it says", fault="gray"),
        Trouble("a site flaps, 6 s up and 6 s down", is_flapping=True),
        Trouble("a third of the routers cannot reach a site", is_partitioned=True),
        Trouble("a region is lost for 25 s", is_region_lost=True),
        Trouble("statuses are 5 s apart", publish_s=5.0),
        Trouble("every turn at another router", moves=1.0),
        Trouble("round trips are off by up to 3 times", rtt_error=3.0),
        Trouble(
            "caches are an eighth as large", cache_share=1 / 8
        ),  # caches so small that their content is replaced several times
    )
}
