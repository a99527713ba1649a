"""Guarantees of the simulation for any policy: no request is lost or counted twice, no policy beats an infinite cache, equal seeds replay exactly,
and a router knows a status only once it can have arrived.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from load_tests.sim.contenders import CONTENDERS
from load_tests.sim.router import HEALTH
from load_tests.sim.run import Simulation, prepare, simulate
from load_tests.sim.traces import TRACES
from load_tests.sim.trouble import Trouble
from load_tests.sim.world import HELD_OUT_SEEDS, TUNING_SEEDS
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest

pytestmark = pytest.mark.long


def ran(policy: str, trace: str, load: str = "heavy", requests: int = 800, seed: int = 11) -> Simulation:
    simulation = prepare(CONTENDERS[policy].make, TRACES[trace], load, requests, seed)
    simulation.run()
    return simulation


@pytest.mark.parametrize("policy", CONTENDERS)
def test_every_request_is_answered_once_or_shed_through_crashes_and_partitions(policy: str) -> None:
    simulation = ran(policy, "chat")
    assert simulation.started > 250
    assert simulation.open_calls == 0
    assert simulation.started == simulation.answered + simulation.shed


@pytest.mark.parametrize("trace", TRACES)
def test_sites_and_routers_count_the_same_requests(trace: str) -> None:
    simulation = ran("Pilotlight", trace)
    for number, site in enumerate(simulation.sites):
        assert site.running + site.waiting == len(simulation.live[number])  # requests at the site
        outstanding = sum(router.backends[number].outstanding for router in simulation.routers)
        assert outstanding >= site.running + site.waiting  # and requests on their way to it
    assert sum(b.outstanding for r in simulation.routers for b in r.backends) <= sum(map(len, simulation.live))


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", ["Pilotlight", "llm-d", "round robin"])
def test_no_policy_hits_more_than_an_infinite_cache(policy: str, trace: str) -> None:
    outcome = simulate(policy, CONTENDERS[policy].make, TRACES[trace], "moderate", 600, 12)
    assert 0 <= outcome.hit_ratio <= outcome.bound < 1


@pytest.mark.parametrize("policy", ["Pilotlight", "llm-d, declining"])
def test_equal_seeds_replay_exactly_and_others_do_not(policy: str) -> None:
    def figures(seed: int) -> dict[str, object]:
        outcome = simulate(policy, CONTENDERS[policy].make, TRACES["burst"], "heavy", 500, seed)
        return asdict(replace(outcome, cpu_s=0.0, seed=0))

    assert figures(11) == figures(11)
    assert figures(11) != figures(12)


def test_a_status_is_known_only_after_half_a_round_trip() -> None:
    policies = list[CostPolicy]()
    ages: dict[tuple[int, int, int], float] = {}  # of a site's statuses, when a router first decides by them

    class WatchingPolicy(CostPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.router = len(policies)
            policies.append(self)

        def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
            for i, view in enumerate(backends):
                if view.status is not None:
                    delay = simulation.world.rtt_s[self.router][i] / 2
                    published_at = view.status_at_s + delay
                    assert request.now_s >= published_at + delay - 1e-9
                    ages.setdefault((self.router, i, view.status.sequence), request.now_s - published_at)
            return super().rank(request, backends)

    simulation = prepare(WatchingPolicy, TRACES["chat"], "heavy", 400, 11, faults=False)
    simulation.run()
    assert len(ages) > 1000
    assert sum(ages.values()) / len(ages) > 0.1
    assert HEALTH.interval_s == 1.0


def test_a_slower_publication_makes_predictions_worse() -> None:
    def error_ms(publish_s: float) -> float:
        alone, trouble = CONTENDERS["no declining"].make, Trouble(publish_s=publish_s)
        run = simulate("x", alone, TRACES["no-reuse"], "heavy", 1500, 11, faults=False, trouble=trouble)
        return run.error_ms["queue"]

    assert error_ms(4.0) > 1.3 * error_ms(0.25)


def test_seeds_of_published_figures_were_not_tuned_with() -> None:
    assert len(HELD_OUT_SEEDS) >= 5
    assert not set(HELD_OUT_SEEDS) & set(TUNING_SEEDS)


def test_the_day_of_the_measured_time_has_the_stated_load() -> None:
    """Fewer sessions start at quiet hours, but their mean over the day is the requested rate."""
    from load_tests.sim.cities import load_cities
    from load_tests.sim.traces import sessions

    made = sessions(TRACES["no-reuse"], load_cities(), 50.0, 400.0, 400.0, 3)
    assert len(made) == pytest.approx(50 * 400, rel=0.1)
