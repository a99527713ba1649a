"""Lending in the simulation: its gain, and its end if the lender has a request itself or crashes."""

from collections import Counter
from dataclasses import asdict, replace

import pytest

from load_tests.sim.cities import load_cities
from load_tests.sim.lending import KV_SIZES, KvSize
from load_tests.sim.outcome import Outcome
from load_tests.sim.policies.static import StaticPolicy, static_policies
from load_tests.sim.run import Simulation, finish, prepare
from load_tests.sim.site import SiteSpec
from load_tests.sim.traces import TRACES, Chain, Session, Turn
from load_tests.sim.world import Outage, World, build_world
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import Policy, RouteRequest
from pilotlight.wire.hop.status import Place
from tests.edge_router.builders import view

SLOW, FAST = 1000.0, 4000.0  # tokens/s
HERE = Place("here", 0.0, 0.0)
SMALL = KvSize("small", 1024)  # every drawn link moves more tokens than the fast site computes
LARGE = KvSize("large", 8 << 20)


def world(*outages: Outage) -> World:
    sites = tuple(
        SiteSpec(name, HERE, rate, 10**9, 10**9, wake_ms=0.0) for name, rate in (("slow1", SLOW), ("fast1", FAST))
    )
    return World(sites, (HERE, HERE), ((0.001, 0.001),) * 2, (0, 1), (0.0, 0.0), (0, 1), outages)


def session(number: int, at: float, tokens: int, city: int = 0) -> Session:
    """Return a session of one turn; clients of city 0 use the slow site, those of city 1 the fast one."""
    chain = Chain(number)
    chain.grow(1, tokens)
    prefixes = tuple(chain.prefixes)
    return Session(number, city, at, iter([Turn(prefixes, tokens, 1, chain.grow(2, 1), 0.0)]))


def ran(sessions: list[Session], kv: KvSize | None = SMALL, *outages: Outage) -> tuple[Outcome, Counter[str]]:
    policies = iter((StaticPolicy({"slow1": 1.0}), StaticPolicy({"fast1": 1.0})))

    def make() -> Policy:
        return next(policies)

    simulation = Simulation(make, world(*outages), sessions, 1, (0.0, 60.0), kv=kv)
    outcome = finish(simulation, "static", "test", "none")
    assert simulation.started == simulation.answered + simulation.shed == len(sessions)
    return outcome, simulation.lending.counts if simulation.lending is not None else Counter()


def test_a_prompt_is_computed_by_an_idle_site_that_is_faster() -> None:
    alone, _ = ran([session(0, 5.0, 4000)], None)
    outcome, counts = ran([session(0, 5.0, 4000)])
    assert alone.p50_ms == pytest.approx(1000 * 4000 / SLOW, rel=0.01)
    assert counts == {"lent": 1, "computed": 1}
    assert 1000 * 4000 / FAST < outcome.p50_ms < 0.6 * alone.p50_ms


def test_nothing_is_lent_over_a_link_that_is_slower_than_the_site_itself() -> None:
    outcome, counts = ran([session(0, 5.0, 4000)], LARGE)
    assert not counts
    assert outcome.p50_ms == pytest.approx(1000 * 4000 / SLOW, rel=0.01)


def test_a_burst_is_shared_by_both_sites() -> None:
    burst = [4000, 4000, 4000, 4000, 4000, 4000]
    alone, _ = ran([session(i, 5.0 + 0.01 * i, tokens) for i, tokens in enumerate(burst)], None)
    outcome, counts = ran([session(i, 5.0 + 0.01 * i, tokens) for i, tokens in enumerate(burst)])
    assert counts["computed"] >= 4
    assert outcome.p95_ms < 0.4 * alone.p95_ms


def test_a_request_of_the_lender_ends_the_loan_and_waits_for_nothing() -> None:
    def mean_ms(*, lends: bool) -> float:
        return ran([session(0, 5.0, 8000), session(1, 5.5, 2000, city=1)], SMALL if lends else None)[0].mean_ms

    _, counts = ran([session(0, 5.0, 8000), session(1, 5.5, 2000, city=1)])
    assert counts == {"lent": 1, "given up": 1}
    own_ms, alone_ms = 1000 * 2000 / FAST, 1000 * 8000 / SLOW
    assert mean_ms(lends=False) == pytest.approx((own_ms + alone_ms) / 2, rel=0.01)
    # what the lender had computed in half a second is not computed again, so the borrower loses nothing
    assert (own_ms + alone_ms - 1500) / 2 < mean_ms(lends=True) < (own_ms + alone_ms - 1000) / 2


def test_a_prompt_survives_the_crash_of_its_lender() -> None:
    outcome, counts = ran([session(0, 5.0, 8000)], SMALL, Outage(1, 5.5, 20.0))
    assert counts == {"lent": 1, "given up": 1}
    assert outcome.shed == 0
    assert outcome.p50_ms < 1000 * (0.6 + 8000 / SLOW)


def test_nothing_is_lent_while_the_lender_has_a_request() -> None:
    _, counts = ran([session(0, 4.0, 40_000, city=1), session(1, 6.0, 4000)])
    assert not counts


def test_a_prompt_of_a_borrower_that_crashed_is_forgotten() -> None:
    outcome, counts = ran([session(0, 5.0, 8000), session(1, 30.0, 100)], SMALL, Outage(0, 5.5, 20.0))
    assert counts["lent"] >= 1
    assert outcome.shed == 0.5, "its site is down, and there is no other"


@pytest.mark.long
@pytest.mark.parametrize("kv", KV_SIZES)
def test_every_request_is_answered_once_where_sites_lend(kv: str) -> None:
    def figures() -> dict[str, object]:
        simulation = prepare(CostPolicy, TRACES["documents"], "heavy", 800, 11, kv=KV_SIZES[kv])
        outcome = finish(simulation, "x", "documents", "heavy")
        assert simulation.started == simulation.answered + simulation.shed
        assert simulation.open_calls == 0
        assert simulation.lending is not None
        counts = simulation.lending.counts
        assert counts["lent"] > 3
        assert counts["lent"] >= counts["declined"] + counts["given up"] + counts["computed"]
        return asdict(replace(outcome, cpu_s=0.0))

    assert figures() == figures(), "equal seeds replay exactly"


def test_every_site_has_clients_if_sites_are_fixed_and_a_conversation_keeps_its_site() -> None:
    cities = load_cities()
    built = build_world(cities, 3, num_sites=40)
    names = [spec.name for spec in built.sites]
    assert len(set(names)) == 40
    used = Counter[str]()
    for policy in static_policies(built, cities):
        for i in range(300):
            request = RouteRequest("m", 100, placement_key=bytes([i % 256, i // 256]))
            first = policy.rank(request, [view(name) for name in names])[0].backend.name
            busy = [view(name, outstanding=100 if name == first else 0) for name in names]
            assert policy.rank(request, busy)[0].backend.name == first
            used[first] += 1
    assert set(used) == set(names)
