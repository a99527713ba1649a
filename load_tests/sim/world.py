"""The simulated world: sites, routers, the paths between them, and the times of failures.

Everything is derived from a seed: the cities with a site, each site's speed, each path's detour, and all failures. The policy was tuned with other
seeds than those of published figures.
"""

import random
from dataclasses import dataclass

from load_tests.sim.cities import City
from load_tests.sim.site import SiteSpec
from pilotlight.edge_router.backends.rtt import DETOUR, seed_rtt_ms
from pilotlight.wire.hop.status import Place

TUNING_SEEDS = tuple(range(1, 13))  # seeds used while policies were changed and tuned
# Seeds of published figures, drawn and first used after the policy was frozen.
HELD_OUT_SEEDS = (22013, 35487, 21617, 82843, 78723)

SITE_CITIES = (
    "Washington", "Dallas", "Los Angeles", "Chicago", "Toronto", "Mexico City", "Sao Paulo", "Bogota", "London", "Frankfurt", "Madrid", "Warsaw",
    "Istanbul", "Dubai", "Johannesburg", "Lagos", "Mumbai", "Delhi", "Singapore", "Jakarta", "Hong Kong", "Shanghai", "Tokyo", "Seoul", "Sydney",
)  # fmt: skip
NUM_SITES = 12  # one in each city that the seed draws
NUM_ROUTERS = 24  # one in each of the cities with most clients
SPEEDS = (3000.0, 4500.0, 6000.0)  # prompt tokens a second: three generations of machines
CACHED_S = 120  # seconds of prefill that fit into a site's cache, host memory included: some 500,000 tokens
RATE_ERROR = 0.1  # standard deviation of the error of a site's own measurement of its rate
REGION_MS = 60.0  # a site whose round trip is longer is in another region
CRASHES, PARTITIONS = 2, 1


@dataclass(frozen=True, slots=True)
class Outage:
    """A crash of one site (`routers` is empty), or a partition between some routers and one site."""

    site: int
    begins: float
    ends: float
    routers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class World:
    sites: tuple[SiteSpec, ...]
    routers: tuple[Place, ...]
    rtt_s: tuple[tuple[float, ...], ...]  # [router][site]
    router_of_city: tuple[int, ...]
    access_s: tuple[float, ...]  # [city]: round trip between its clients and their router
    region_of_router: tuple[int, ...]  # the nearest site's region; sites farther than REGION_MS count as cross-region
    outages: tuple[Outage, ...] = ()


def build_world(cities: tuple[City, ...], seed: int, span: tuple[float, float] | None = None) -> World:
    """Build a world. `span`: the interval of failures; None for no failures."""
    rng = random.Random(f"{seed} world")
    places = {city.name: city.place for city in cities}
    specs = []
    for name in sorted(rng.sample(SITE_CITIES, NUM_SITES)):
        speed = rng.choice(SPEEDS)
        code = name.lower().replace(" ", "")[:5]
        specs.append(
            SiteSpec(
                f"{code}1",
                places[name],
                speed,
                int(speed * CACHED_S),
                int(speed / 40),
                rng.uniform(350, 2500),
                rng.lognormvariate(0, RATE_ERROR),
            )
        )
    chosen = sorted(cities, key=lambda city: -city.weight)[:NUM_ROUTERS]
    stand = tuple(city.place for city in chosen)
    rtt = tuple(tuple(path_s(rng, place, spec.place) for spec in specs) for place in stand)
    nearest = tuple(min(range(len(stand)), key=lambda r: seed_rtt_ms(city.place, stand[r])) for city in cities)
    access = tuple(seed_rtt_ms(city.place, stand[r]) / 1000 + 0.002 for city, r in zip(cities, nearest, strict=True))
    region = tuple(min(range(len(specs)), key=lambda s: row[s]) for row in rtt)
    outages = _outages(rng, len(specs), len(stand), span) if span is not None else ()
    return World(tuple(specs), stand, rtt, nearest, access, region, outages)


def path_s(rng: random.Random, one: Place, other: Place) -> float:
    """Draw the round trip between two places in seconds; cables take a detour."""
    return seed_rtt_ms(one, other) / 1000 * rng.uniform(1.3, 2.5) / DETOUR + 0.0005


def _outages(rng: random.Random, sites: int, routers: int, span: tuple[float, float]) -> tuple[Outage, ...]:
    """Draw crashes, and partitions of a third of the routers, from the seed."""
    outages = []
    for i in range(CRASHES + PARTITIONS):
        begins = rng.uniform(*span)
        cut = frozenset(rng.sample(range(routers), routers // 3)) if i >= CRASHES else frozenset()
        outages.append(Outage(rng.randrange(sites), begins, begins + rng.uniform(20, 60), cut))
    return tuple(outages)
