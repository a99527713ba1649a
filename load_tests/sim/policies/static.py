"""Baseline without spill-over: each conversation has one site, whatever the load.

It moves only while that site is down. The sites of a router are the nearest ones, and each site has clients in proportion to its speed.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate

from load_tests.sim.cities import City
from load_tests.sim.world import World
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible

Shares = dict[str, float]  # site -> share of the conversations of all routers


class StaticPolicy:
    def __init__(self, shares: Shares) -> None:
        self._names = list(shares)
        self._cumulated = list(accumulate(shares.values()))

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        digest = blake2b(request.placement_key or b"", digest_size=8).digest()
        drawn = int.from_bytes(digest, "big") / 2**64 * self._cumulated[-1]
        first = min(bisect(self._cumulated, drawn), len(self._names) - 1)
        order = {name: number for number, name in enumerate([*self._names[first:], *self._names[:first]])}
        usable = [backend for backend in eligible(request, backends) if backend.name in order]
        usable.sort(key=lambda backend: order[backend.name])
        return [Preference(backend, 0.0, {}, "static") for backend in usable]


def static_policies(world: World, cities: Sequence[City]) -> Iterator[StaticPolicy]:
    """Yield the policy of each router of a world, in their order."""
    demand, speed = [0.0] * len(world.routers), [spec.prefill_tokens_per_s for spec in world.sites]
    for city, router in zip(cities, world.router_of_city, strict=True):
        demand[router] += city.weight / sum(each.weight for each in cities)
    left = [each / sum(speed) for each in speed]
    shares: list[Shares] = [{} for _ in world.routers]
    pairs = sorted((rtt_s, r, s) for r, row in enumerate(world.rtt_s) for s, rtt_s in enumerate(row))
    for _, router, site in pairs:
        if (taken := min(demand[router], left[site])) > 0:
            shares[router][world.sites[site].name] = taken
            demand[router] -= taken
            left[site] -= taken
    return (StaticPolicy(each) for each in shares)
