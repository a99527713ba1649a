"""Limits that routers share: their sum, operation while the store is lost, and the store after its return."""

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest

from pilotlight.edge_router.admission.quotas.daily import DailyQuotas
from pilotlight.edge_router.admission.quotas.lease_store import EXPIRES_S, LeaseClaim, LeaseGrant, LeaseKey, granted
from pilotlight.edge_router.admission.quotas.shared import (
    ASKED_AGAIN_S,
    CONFIRMED_EVERY_S,
    GIVEN_BACK_S,
    LEASE_SHARE,
    TICK_S,
    TOLD_EVERY_S,
    QuotaLease,
    SharedQuotas,
)
from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError
from pilotlight.sites.network import CustomerConfig
from pilotlight.wire.errors import ApiError
from tests.asgi import eventually
from tests.edge_router.builders import Clock

KEY = LeaseKey("acme", "tokens_per_day", 1)


class MemoryLeases:
    """The store's arithmetic without a database. If `fault` is set, it is raised instead."""

    def __init__(self, clock: Clock) -> None:
        self.used: dict[LeaseKey, tuple[float, float]] = {}
        self.held: dict[tuple[LeaseKey, str], tuple[float, float]] = {}
        self.fault = ""
        self.exchanges = 0
        self._clock = clock

    def exchange(self, router: str, claims: Sequence[LeaseClaim]) -> list[LeaseGrant]:
        self.exchanges += 1
        if self.fault:
            raise UsageStoreError(self.fault)
        return [self._exchange(router, claim) for claim in claims]

    def _exchange(self, router: str, claim: LeaseClaim) -> LeaseGrant:
        now = self._clock()
        used, at = self.used.get(claim.key, (claim.before, now))
        used = max(0.0, used - claim.per_s * (now - at)) + claim.spent
        self.used[claim.key] = used, now
        grant = granted(claim, used, self.lent(claim.key, but=router))
        self.held[claim.key, router] = grant.held, now
        return grant

    def lent(self, key: LeaseKey, but: str = "") -> float:
        return sum(
            held
            for (of, router), (held, seen) in self.held.items()
            if of == key and router != but and seen > self._clock() - EXPIRES_S
        )

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class Network:
    """Routers with a common store and clock, which exchange claims when a test calls them."""

    def __init__(self, num_routers: int = 3, *, serves_without: bool = True) -> None:
        self.clock = Clock()
        self.store = MemoryLeases(self.clock)
        self.routers = [
            SharedQuotas(self.store, serves_without=serves_without, clock=self.clock) for _ in range(num_routers)
        ]

    async def __aenter__(self) -> "Network":
        self._tasks = [asyncio.create_task(router.run()) for router in self.routers]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for router in self.routers:
            await router.close()

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock tick by tick, with each router's exchanges."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            for router in self.routers:
                await router.report()


async def take(router: SharedQuotas, capacity: float, need: float = 1.0, per_s: float = 0.0) -> QuotaLease | None:
    """Spend `need` of a lease and return None, or return the lease whose limit is used up."""
    lease = router.lease(KEY, capacity, per_s)
    short = await router.short([(lease, need)])
    if short is None:
        lease.spend(need)
    return short


def test_what_is_at_work_stays_held_though_more_is_used_than_there_is() -> None:
    claim = LeaseClaim(KEY, capacity=100, per_s=0, before=0, spent=0, at_work=5, spare=10)
    assert granted(claim, used=40, held_by_others=20) == LeaseGrant(held=15, free=25)
    assert granted(claim, used=98, held_by_others=10) == LeaseGrant(held=5, free=-13)


def lease_of(held: float = 0.0, **more: float) -> QuotaLease:
    """Return a lease of a limit of 160, with a lease size of 10. The store confirmed it at the time 100."""
    lease = QuotaLease(KEY, 160, more.pop("per_s", 0.0), 0, now=100.0)
    lease.held, lease.seen_at = held, 100.0
    for name, value in more.items():
        setattr(lease, name, value)
    return lease


UNUSED = 100.0 - GIVEN_BACK_S


@pytest.mark.parametrize(
    ("lease", "after_s", "is_due"),
    [
        (lease_of(10), 0.0, False),
        (lease_of(10, wanted=1), 0.0, True),
        (lease_of(20), 0.0, False),
        (lease_of(20.1), 0.0, True),  # more than twice the lease size
        (lease_of(23, at_work=2, spent=1), 0.0, False),
        (lease_of(5), 0.0, False),
        (lease_of(4.9), 0.0, True),  # less than half of the lease size
        (lease_of(4.9, empty_until=100.1), 0.0, False),  # the limit was used up just before
        (lease_of(4.9, empty_until=100.0), 0.0, True),
        (lease_of(3, at_work=3, used_at=UNUSED), 0.0, False),
        (lease_of(3.1, at_work=3, used_at=UNUSED), 0.0, True),  # unused, so it is returned
        (lease_of(30, used_at=UNUSED + 0.1, at_work=20), 0.0, False),
        (lease_of(10, spent=1), TOLD_EVERY_S - 0.01, False),
        (lease_of(10, spent=1), TOLD_EVERY_S, True),
        (lease_of(10), CONFIRMED_EVERY_S - 0.6, False),
        (lease_of(10, used_at=101.0), CONFIRMED_EVERY_S, True),
        (lease_of(3, at_work=3, used_at=UNUSED), CONFIRMED_EVERY_S - 0.1, False),
        (lease_of(3, at_work=3, used_at=UNUSED), CONFIRMED_EVERY_S, True),
        (lease_of(0, used_at=UNUSED), 1e6, False),
    ],
)
def test_the_store_hears_of_a_lease_when_there_is_something_to_tell(
    lease: QuotaLease, after_s: float, is_due: bool
) -> None:
    assert lease.is_due(100.0 + after_s) == is_due


def test_a_lease_is_worth_its_rest_until_the_store_may_have_given_it_away() -> None:
    lease = lease_of(10, at_work=3, spent=2)
    assert [lease.room(100.0), lease.room(100.0 + EXPIRES_S - 0.1), lease.room(100.0 + EXPIRES_S)] == [5, 5, 0]
    assert QuotaLease(KEY, 160, 0, 0, now=100.0).room(100.0) == 0
    assert [QuotaLease(KEY, capacity, 0, 0, now=0).size for capacity in (160, 16, 1)] == [10, 1, 1]
    lease = lease_of(4, per_s=2.0, free=1.0)
    assert [lease.wait_s(need, 100.0) for need in (4, 5, 9)] == [0, 0, 2]
    assert lease_of(4).wait_s(9, 100.0) == 1.0, "this limit does not refill"


def test_a_claim_contains_spending_since_the_last_one_and_the_wanted_reserve() -> None:
    lease = lease_of(10, spent=2, at_work=3)
    claim = lease.claim(100.0)
    assert claim == LeaseClaim(KEY, 160, 0, 0, 2, 3, spare=10)
    lease.spend(5)  # before the store answers
    lease.answered(claim, LeaseGrant(12, 0.5), 101.0)
    assert (lease.held, lease.free, lease.spent, lease.seen_at, lease.empty_until) == (12, 0.5, 5, 101.0, float("-inf"))
    lease.answered(lease.claim(102.0), LeaseGrant(12, 0.0), 102.0)
    assert (lease.spent, lease.empty_until) == (0, 102.0 + ASKED_AGAIN_S)
    assert [lease_of(1, used_at=UNUSED, wanted=wanted).claim(100.0).spare for wanted in (0.0, 4.0)] == [0, 14]


@pytest.mark.parametrize("still", [{"held": 1.0}, {"at_work": 1.0}, {"spent": 1.0}, {"used_at": UNUSED + 0.1}])
def test_a_lease_is_forgotten_when_nothing_is_left_of_it(still: dict[str, float]) -> None:
    assert lease_of(used_at=UNUSED).is_gone(100.0)
    assert not lease_of(**{"used_at": UNUSED, **still}).is_gone(100.0)


async def test_spending_without_the_store_is_reported_however_long_it_was() -> None:
    network = Network(1)  # its router exchanges claims only on demand
    (router,) = network.routers
    lease = router.lease(KEY, 100)
    lease.spend(7)
    network.store.fault = "away"
    await network.pass_time(GIVEN_BACK_S + 3 * EXPIRES_S)
    network.store.fault = ""
    await network.pass_time(TOLD_EVERY_S + TICK_S)
    assert network.store.used[KEY][0] == 7
    await router.close()


async def test_a_router_that_stops_gives_its_part_back_at_once() -> None:
    network = Network(1)  # its router exchanges claims only on demand
    (router,) = network.routers
    router.lease(KEY, 100).spend(1)
    await network.pass_time(2 * TICK_S)
    assert network.store.lent(KEY) > 0
    await router.close()
    assert network.store.lent(KEY) == 0
    assert network.store.used[KEY][0] == 1


async def test_routers_give_together_what_the_limit_is_and_no_more() -> None:
    async with Network() as network:
        given = [0, 0, 0]
        for turn in range(400):
            given[turn % 3] += await take(network.routers[turn % 3], 100) is None
        assert sum(given) <= 100
        assert sum(given) >= 100 - 2 * 100 * LEASE_SHARE
        assert min(given) > 20, "each router gets a part"


async def test_a_lease_that_is_in_use_stays() -> None:
    async with Network(1) as network:
        (router,) = network.routers
        for _ in range(8):
            assert await take(router, 1000) is None
            await network.pass_time(1.0)
        assert router.lease(KEY, 1000).held >= 1000 * LEASE_SHARE / 2
        assert network.store.used[KEY][0] == 8


async def test_a_store_that_hangs_is_interrupted() -> None:
    class Hanging(MemoryLeases):
        def __init__(self, clock: Clock) -> None:
            super().__init__(clock)
            self.interrupted = threading.Event()

        def exchange(self, router: str, claims: Sequence[LeaseClaim]) -> list[LeaseGrant]:
            assert self.interrupted.wait(60)
            raise UsageStoreError("interrupted")

        def interrupt(self) -> None:
            self.interrupted.set()

    clock = Clock()
    router = SharedQuotas(Hanging(clock), serves_without=True, clock=clock, answers_within_s=0.05)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(router.run())
        assert await take(router, 100) is None, "the request is served without the store"
        await eventually(lambda: router.fault == "interrupted")
        running.cancel()
    await router.close()


async def test_what_one_router_leaves_unused_goes_to_the_others() -> None:
    async with Network() as network:
        assert await take(network.routers[0], 100) is None
        assert network.store.lent(KEY) == pytest.approx(1 + 100 * LEASE_SHARE)
        await network.pass_time(GIVEN_BACK_S + TOLD_EVERY_S + TICK_S)
        assert network.store.lent(KEY) == 0
        assert len(network.routers[0]) == 0
        assert [await take(network.routers[1], 100) for _ in range(99)] == [None] * 99
        assert await take(network.routers[1], 100) is not None


async def test_requests_at_the_same_time_wait_for_one_answer_of_the_store() -> None:
    async with Network(1) as network:
        (router,) = network.routers
        refused = await asyncio.gather(*(take(router, 64) for _ in range(80)))
        assert sum(short is None for short in refused) == 64
        assert network.store.exchanges < 10


async def test_a_limit_that_is_used_up_is_not_asked_for_again_at_once() -> None:
    async with Network(1) as network:
        (router,) = network.routers
        assert [await take(router, 2) is None for _ in range(3)] == [True, True, False]
        asked = network.store.exchanges
        for _ in range(100):
            short = await take(router, 2)
            assert short is not None
            assert short.wait_s(1, network.clock()) == 1.0
        assert network.store.exchanges == asked


async def test_a_minutes_limit_fills_again_and_says_when() -> None:
    async with Network(2) as network:
        given = 0
        for turn in range(200):
            given += await take(network.routers[turn % 2], 60, per_s=1.0) is None
        assert 60 - 60 * LEASE_SHARE <= given <= 60
        network.clock.advance(0.5)
        short = [await take(router, 60, per_s=1.0) for router in network.routers]
        waits = [lease.wait_s(1, network.clock()) for lease in short if lease is not None]
        assert all(0 < wait_s <= 1 for wait_s in waits)
        network.clock.advance(EXPIRES_S - 1)
        later = 0
        for turn in range(100):
            later += await take(network.routers[turn % 2], 60, per_s=1.0) is None
        assert given + later <= 60 + EXPIRES_S


async def test_a_request_larger_than_a_lease_gets_it_and_what_it_does_not_get_goes_back() -> None:
    async with Network(2) as network:
        one, other = network.routers
        assert await take(one, 1000, 600) is None
        assert await take(one, 1000, 500) is one.lease(KEY, 1000)
        await network.pass_time(TICK_S * 2)
        assert await take(other, 1000, 300) is None, "the refused request's lease was given back"
        assert await take(other, 1000, 200) is not None


async def test_work_that_comes_back_counts_while_it_is_there_and_ends_with_its_router() -> None:
    async with Network(2) as network:
        one, other = network.routers
        lease = one.lease(KEY, 4)
        for _ in range(3):
            assert await one.short([(lease, 1.0)]) is None
            lease.begin(1)
        await network.pass_time(EXPIRES_S * 2)  # requests may stay open for any time
        assert await take(other, 4) is None
        assert await take(other, 4) is not None
        lease.end(1)
        await network.pass_time(GIVEN_BACK_S + CONFIRMED)
        assert await take(other, 4) is None
        network.routers.remove(one)  # killed
        await network.pass_time(EXPIRES_S + CONFIRMED)
        assert [await take(other, 4) for _ in range(2)] == [None, None]
        assert await take(other, 4) is not None
        network.routers.append(one)


CONFIRMED = 3.0  # more than the time between two confirmations


@pytest.mark.long
@pytest.mark.parametrize("serves_without", [True, False])
async def test_a_lost_store_stops_no_routing_or_all_beyond_the_lease_as_configured(serves_without: bool) -> None:
    async with Network(2, serves_without=serves_without) as network:
        one = network.routers[0]
        assert await take(one, 160) is None  # the router also leases 10 more
        network.store.fault = "it is away"
        if serves_without:
            assert [await take(one, 160) for _ in range(100)] == [None] * 100
        else:
            assert [await take(one, 160) for _ in range(10)] == [None] * 10
            with pytest.raises(ApiError, match="cannot be checked right now") as refused:
                await take(one, 160)
            assert refused.value.word == "overloaded"
        assert one.fault == "it is away"
        network.store.fault = ""
        await network.pass_time(TOLD_EVERY_S + TICK_S)
        assert one.fault is None
        assert network.store.used[KEY][0] == (101 if serves_without else 11), "usage in the meantime is reported"
        left = 59 if serves_without else 149
        given = 0
        for turn in range(400):
            given += await take(network.routers[turn % 2], 160) is None
        assert left - 10 <= given <= left


@pytest.mark.parametrize("seed", range(8))
async def test_at_any_moment_no_more_is_used_lent_and_at_work_than_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    async with Network(3) as network:
        spent, at_work, capacity = 0, [0, 0, 0], 120
        for _ in range(600):
            number = rng.randrange(3)
            lease = network.routers[number].lease(KEY, capacity)
            match rng.choice(("reserve", "reserve", "settle", "tick")):
                case "reserve":
                    need = rng.randint(1, 12)
                    if await network.routers[number].short([(lease, need)]) is None:
                        lease.begin(need)
                        at_work[number] += need
                case "settle" if at_work[number]:
                    reserved = rng.randint(1, at_work[number])
                    used = rng.randint(0, reserved)
                    lease.end(reserved)
                    lease.spend(used)
                    at_work[number] -= reserved
                    spent += used
                case "tick":
                    await network.pass_time(TICK_S)
            assert spent + sum(at_work) <= capacity
            assert network.store.used.get(KEY, (0,))[0] + network.store.lent(KEY) <= capacity
        await network.pass_time(2 * TOLD_EVERY_S)
        assert network.store.used[KEY][0] == spent


async def test_a_days_quota_is_the_networks_and_begins_with_what_the_ledger_has() -> None:
    async with Network(2) as network:
        days = [DailyQuotas(network.clock, router) for router in network.routers]
        for day in days:
            day.set([CustomerConfig(name="acme", tokens_per_day=100, cost_per_day=1.0)])
        days[0].begin_with("acme", 40, 0)
        await days[0].ready("acme", 30, 0)
        reserved = days[0].reserve("acme", 30, 0)
        with pytest.raises(ApiError, match=r"100 tokens a day \(UTC\): 7\d are used or reserved") as refused:
            await days[1].ready("acme", 31, 0)
        assert refused.value.word == "quota_exceeded"
        days[0].settle(reserved, 5, 0)
        await network.pass_time(2 * TOLD_EVERY_S)
        await days[1].ready("acme", 45, 0)
        days[1].settle(days[1].reserve("acme", 45, 0), 45, 0)
        days[1].recovered("acme", network.clock(), 3, 0)
        days[1].recovered("acme", network.clock() - 2 * 86_400, 1000, 0)  # usage of another day
        await network.pass_time(2 * TOLD_EVERY_S)
        used = {key.limit: used for key, (used, _) in network.store.used.items()}
        assert used == {"tokens_per_day": 40 + 5 + 45 + 3, "cost_per_day": 0}
