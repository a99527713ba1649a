"""The stage: sites, routers, the paths between them, and what goes wrong with them when.

Everything is derived from a seed. A path's round trip is the line of sight times a detour drawn for the pair: routers begin with the seed
of edge_router/rtt.py and measure the truth.
"""

import random
from dataclasses import dataclass

from edge_router.rtt import DETOUR, seed_rtt_ms
from load_tests.sim.cities import City
from load_tests.sim.site import SiteSpec
from wire.status import Place

SITE_CITIES = (
    "Washington", "Dallas", "Los Angeles", "Chicago", "Toronto", "Mexico City", "Sao Paulo", "Bogota", "London", "Frankfurt", "Madrid", "Warsaw",
    "Istanbul", "Dubai", "Johannesburg", "Lagos", "Mumbai", "Delhi", "Singapore", "Jakarta", "Hong Kong", "Shanghai", "Tokyo", "Seoul", "Sydney",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outage:
    """A crash of one site (`routers` empty: everybody sees it), or a partition between some routers and one site."""

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
    access_s: tuple[float, ...]  # [city]: round trip between clients there and their router
    region_of_router: tuple[int, ...]  # the site nearest to it: sent elsewhere counts as cross-region beyond REGION_MS
    outages: tuple[Outage, ...] = ()


REGION_MS = 60.0  # a site whose round trip is longer is in another region


def build_world(
    cities: tuple[City, ...], seed: int, routers: int = 48, horizon_s: float = 0.0, faults: bool = True
) -> World:
    rng = random.Random(f"{seed} world")
    places = {city.name: city.place for city in cities}
    specs = []
    for name in SITE_CITIES:
        speed = rng.choice((3000.0, 4500.0, 6000.0))  # tokens a second: three generations of machines
        code = name.lower().replace(" ", "")[:5]
        specs.append(
            SiteSpec(f"{code}1", places[name], speed, int(speed * 150), int(speed / 40), rng.uniform(350, 2500))
        )
    chosen = sorted(cities, key=lambda city: -city.weight)[:routers]
    stand = tuple(city.place for city in chosen)
    rtt = tuple(
        tuple(seed_rtt_ms(place, spec.place) / 1000 * rng.uniform(1.3, 2.5) / DETOUR + 0.0005 for spec in specs)
        for place in stand
    )
    nearest = tuple(min(range(len(stand)), key=lambda r: seed_rtt_ms(city.place, stand[r])) for city in cities)
    access = tuple(seed_rtt_ms(city.place, stand[r]) / 1000 + 0.002 for city, r in zip(cities, nearest, strict=True))
    region = tuple(min(range(len(specs)), key=lambda s: row[s]) for row in rtt)
    return World(
        tuple(specs),
        stand,
        rtt,
        nearest,
        access,
        region,
        _outages(rng, len(specs), len(stand), horizon_s) if faults else (),
    )


def _outages(rng: random.Random, sites: int, routers: int, horizon_s: float) -> tuple[Outage, ...]:
    """Two crashes and one partition of a third of the routers, at times and places of the seed."""
    outages = []
    for _ in range(2):
        begins = rng.uniform(0.2, 0.8) * horizon_s
        outages.append(Outage(rng.randrange(sites), begins, begins + rng.uniform(20, 60)))
    begins = rng.uniform(0.2, 0.8) * horizon_s
    cut = frozenset(rng.sample(range(routers), routers // 3))
    return (*outages, Outage(rng.randrange(sites), begins, begins + 40, cut))
