"""Each trouble has the effect of its name in the simulation. A misleading site costs our policy little more than its own share."""

import statistics
from collections.abc import Sequence
from functools import cache

import pytest
from msgspec.structs import replace

from load_tests.sim.cities import load_cities
from load_tests.sim.run import simulate
from load_tests.sim.site import SimSite
from load_tests.sim.traces import TRACES
from load_tests.sim.trouble import FLAP_S, NONE, TROUBLES, Trouble, hit_site
from load_tests.sim.world import build_world
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest

pytestmark = pytest.mark.long

WORLD = build_world(load_cities(), 1)
MEASURED = (100.0, 200.0)


def test_a_trouble_hits_the_site_that_most_clients_are_nearest_to() -> None:
    assert WORLD.rtt_s[0][hit_site(WORLD)] == min(WORLD.rtt_s[0])


def test_outages_lie_within_the_measured_time_and_at_whom_they_are_for() -> None:
    flaps = Trouble(is_flapping=True).outages(WORLD, MEASURED)
    assert [outage.ends - outage.begins for outage in flaps] == [FLAP_S] * 8
    assert {outage.site for outage in flaps} == {hit_site(WORLD)}
    (cut,) = Trouble(is_partitioned=True).outages(WORLD, MEASURED)
    assert len(cut.routers) == len(WORLD.routers) / 3
    lost = Trouble(is_region_lost=True).outages(WORLD, MEASURED)
    assert hit_site(WORLD) in {outage.site for outage in lost}
    assert all(MEASURED[0] < outage.begins < outage.ends < MEASURED[1] for outage in (*flaps, cut, *lost))
    assert NONE.outages(WORLD, MEASURED) == ()


def test_round_trips_are_off_by_at_most_the_factor_both_ways() -> None:
    factors = [
        factor for row in TROUBLES["round trips are off by up to 3 times"].rtt_factors(WORLD, 1) for factor in row
    ]
    assert 1 / 3 <= min(factors) < 0.5
    assert 2 < max(factors) <= 3
    assert {factor for row in NONE.rtt_factors(WORLD, 1) for factor in row} == {1.0}


def test_small_caches_turn_over_where_whole_ones_never_fill() -> None:
    small = Trouble(cache_share=1 / 8)
    whole, turned = (
        simulate("ours", CostPolicy, TRACES["chat"], "heavy", 1800, 11, trouble=each) for each in (NONE, small)
    )
    assert whole.turned_over == 0
    assert turned.turned_over > 0.3
    assert turned.hit_ratio < whole.hit_ratio


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("a site publishes no load and never declines", 1.6),
        ("a site claims to hold what others hold", 1.6),
        ("a site is 8 times slower than it says", 1.6),
    ],
)
def test_a_site_that_misleads_costs_little_more_than_its_own_share(name: str, most: float) -> None:
    """The site is one of twelve, and the nearest one to the most clients.

    These runs are small, so the bounds are wider than the recorded results.
    """
    assert p95_ms(TROUBLES[name]) <= most * p95_ms(NONE)


class TrustingPolicy(CostPolicy):
    """Our policy without the lateness that routers observe."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        return super().rank(request, [replace(view, lateness_ms=0.0) for view in backends])


def test_without_what_routers_observe_a_site_that_claims_to_be_idle_ruins_all() -> None:
    """This fault is severe without observed lateness, so the test above proves something."""
    base_ms = p95_ms(NONE)
    told = Trouble(fault="says idle")
    run = simulate("ours", TrustingPolicy, TRACES["chat"], "heavy", 1800, 11, faults=False, trouble=told)
    assert run.p95_ms > 3 * base_ms
    assert SimSite(WORLD.sites[0], "says idle").told_queue_tokens() == 0


@cache
def p95_ms(trouble: Trouble) -> float:
    runs = [
        simulate("ours", CostPolicy, TRACES["chat"], "heavy", 1800, seed, faults=False, trouble=trouble)
        for seed in (11, 12)
    ]
    return statistics.fmean(run.p95_ms for run in runs)
