"""Daily quotas: reserved, settled, and reset at midnight."""

from typing import cast

import pytest

from pilotlight.edge_router.admission.quotas.daily import DAY_S, DAYS_KEPT, DailyQuotas
from pilotlight.edge_router.admission.quotas.lease_store import LeaseKey
from pilotlight.edge_router.admission.quotas.shared import QuotaLease, SharedQuotas
from pilotlight.edge_router.metering.ledger.prices import BILLIONTHS
from pilotlight.sites.network import CustomerConfig
from pilotlight.wire.errors import ApiError
from tests.edge_router.builders import Clock


def quotas(clock: Clock, **limits: float) -> DailyQuotas:
    made = DailyQuotas(clock)
    made.set([CustomerConfig(name="acme", **limits)])
    return made


def test_what_is_reserved_counts_until_it_is_settled() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    first, second = kept.reserve("acme", 60, 0), kept.reserve("acme", 40, 0)
    with pytest.raises(ApiError, match=r"acme may have 100 tokens a day \(UTC\): 100 are used or reserved") as refused:
        kept.reserve("acme", 1, 0)
    assert (refused.value.word, refused.value.retry_after_s) == ("quota_exceeded", DAY_S - clock.now)
    kept.settle(first, 10, 0)
    kept.settle(second, 45, 0)
    third = kept.reserve("acme", 45, 0)
    with pytest.raises(ApiError):
        kept.reserve("acme", 1, 0)
    kept.settle(third, 0, 0)
    kept.reserve("bob", 10**9, 10**18)  # unlimited


def test_a_quota_that_is_set_today_counts_todays_usage() -> None:
    kept = quotas(Clock())
    kept.settle(kept.reserve("acme", 60, 0), 50, 0)
    kept.set([CustomerConfig(name="acme", tokens_per_day=100)])
    with pytest.raises(ApiError, match="50 are used"):
        kept.reserve("acme", 51, 0)
    assert kept.reserve("acme", 50, 0)


def test_money_is_a_quota_too() -> None:
    kept = quotas(Clock(), cost_per_day=2.0)
    assert kept.reserve("acme", 10**9, 2 * BILLIONTHS)
    with pytest.raises(ApiError, match="2 of money a day"):
        kept.reserve("acme", 0, 1)


def test_a_day_begins_anew_and_what_ends_in_it_but_began_before_is_not_its_own() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    before = kept.reserve("acme", 100, 0)
    clock.advance(DAY_S)
    assert kept.reserve("acme", 100, 0)
    kept.settle(before, 1000, 0)
    with pytest.raises(ApiError, match="100 are used"):
        kept.reserve("acme", 1, 0)


def test_a_router_begins_with_what_its_ledger_has_of_the_day() -> None:
    kept = quotas(Clock(), tokens_per_day=100)
    kept.begin_with("acme", 90, 0)
    with pytest.raises(ApiError, match="90 are used"):
        kept.reserve("acme", 11, 0)
    assert kept.reserve("acme", 10, 0)


def test_a_day_began_at_midnight_by_utc_and_may_be_years_from_any_other() -> None:
    clock = Clock()
    clock.now = 20_000.5 * DAY_S
    kept = quotas(clock, tokens_per_day=100)
    assert kept.day_began_s == 20_000 * DAY_S
    clock.advance(DAY_S / 2 - 1)
    kept.reserve("acme", 1, 0)
    assert kept.day_began_s == 20_000 * DAY_S
    clock.advance(1)
    kept.reserve("acme", 1, 0)
    assert kept.day_began_s == 20_001 * DAY_S


def test_what_functions_used_yesterday_is_not_todays() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    kept.count("acme", clock.now - DAY_S, 90, 0)
    kept.settle(kept.reserve("acme", 100, 0), 0, 0)
    kept.count("acme", clock.now, 90, 0)
    with pytest.raises(ApiError, match="90 are used"):
        kept.reserve("acme", 11, 0)


def test_what_functions_use_before_the_first_request_of_a_day_is_that_days() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    clock.advance(DAY_S)
    kept.count("acme", clock.now, 90, 0)
    with pytest.raises(ApiError, match="90 are used"):
        kept.reserve("acme", 11, 0)


def test_a_clock_that_jumps_a_day_and_comes_back_gives_no_quota_anew() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    at_work = kept.reserve("acme", 60, 0)
    clock.advance(DAY_S)
    tomorrow = kept.reserve("acme", 100, 0)
    kept.settle(at_work, 90, 0)  # usage counts on the day of its reservation
    for back in (-DAY_S, 0):
        clock.advance(back)
        with pytest.raises(ApiError, match="90 are used"):
            kept.reserve("acme", 11, 0)
    clock.advance(DAY_S)
    with pytest.raises(ApiError, match="100 are used"):
        kept.reserve("acme", 1, 0)
    kept.settle(tomorrow, 40, 0)
    assert kept.reserve("acme", 60, 0)


def test_days_that_have_passed_are_forgotten() -> None:
    clock = Clock()
    kept = quotas(clock, tokens_per_day=100)
    first = kept.reserve("acme", 100, 0)
    for _ in range(DAYS_KEPT):
        clock.advance(DAY_S)
        assert kept.reserve("acme", 100, 0)
    for _ in range(DAYS_KEPT - 1):
        clock.advance(-DAY_S)
        with pytest.raises(ApiError, match="100 are used"):
            kept.reserve("acme", 1, 0)
    kept.settle(first, 200, 0)  # has no effect, because its day is no longer counted
    clock.advance(-DAY_S)
    assert kept.reserve("acme", 100, 0)


class Shared:
    """Fake leases of the limits that routers share."""

    def __init__(self) -> None:
        self.leases: dict[LeaseKey, QuotaLease] = {}
        self.needs: list[tuple[LeaseKey, float]] = []
        self.too_little: LeaseKey | None = None

    def lease(self, key: LeaseKey, capacity: float, per_s: float = 0.0, before: float = 0.0) -> QuotaLease:
        assert per_s == 0.0, "a daily quota does not refill during the day"
        return self.leases.setdefault(key, QuotaLease(key, capacity, per_s, before, 0.0))

    async def short(self, needs: list[tuple[QuotaLease, float]]) -> QuotaLease | None:
        self.needs = [(lease.key, need) for lease, need in needs]
        return next((lease for lease, _ in needs if lease.key == self.too_little), None)


async def test_open_requests_and_spending_are_reported_to_other_routers() -> None:
    clock, shared = Clock(), Shared()
    kept = DailyQuotas(clock, cast(SharedQuotas, shared))
    kept.set([CustomerConfig(name="acme", tokens_per_day=100, cost_per_day=2.0), CustomerConfig(name="free")])
    kept.begin_with("acme", 10, 3)
    await kept.ready("acme", 30, BILLIONTHS)
    tokens, money = LeaseKey("acme", "tokens_per_day", 0), LeaseKey("acme", "cost_per_day", 0)
    assert shared.needs == [(tokens, 30), (money, BILLIONTHS)]
    assert {key: (lease.capacity, lease.before) for key, lease in shared.leases.items()} == {
        tokens: (100, 10), money: (2 * BILLIONTHS, 3),
    }  # fmt: skip
    reserved = kept.reserve("acme", 30, BILLIONTHS)
    assert [(lease.at_work, lease.spent) for lease in shared.leases.values()] == [(30, 0), (BILLIONTHS, 0)]
    kept.settle(reserved, 12, 5)
    assert [(lease.at_work, lease.spent) for lease in shared.leases.values()] == [(0, 12), (0, 5)]
    kept.recovered("acme", kept.day_began_s, 1, 2)
    kept.recovered("acme", -1.0, 100, 100)  # usage of the previous day
    kept.count("acme", clock.now, 3, 4)
    assert [lease.spent for lease in shared.leases.values()] == [16, 11]
    for account in ("free", "nobody"):
        await kept.ready(account, 9, 9)
        assert shared.needs == []
        kept.settle(kept.reserve(account, 9, 9), 9, 9)
    assert len(shared.leases) == 2
    clock.advance(DAY_S)
    kept.reserve("acme", 1, 1)
    assert {key.period: lease.before for key, lease in shared.leases.items()} == {0: 3, 1: 0}, (
        "a new day begins without usage"
    )


async def test_an_account_with_too_little_left_at_all_routers_learns_how_much_of_what() -> None:
    clock, shared = Clock(), Shared()
    kept = DailyQuotas(clock, cast(SharedQuotas, shared))
    kept.set([CustomerConfig(name="acme", tokens_per_day=1000, cost_per_day=2.0)])
    await kept.ready("acme", 1, 1)
    for limit, scale, says in (
        (
            "tokens_per_day",
            1,
            "may have 1,000 tokens a day (UTC): 975 are used or reserved, and this request may take 30;",
        ),
        (
            "cost_per_day",
            BILLIONTHS / 1000,
            "may have 2 of money a day (UTC): 1.975 are used or reserved, and this request may take 0.03;",
        ),
    ):
        shared.too_little = LeaseKey("acme", limit, 0)
        lease = shared.leases[shared.too_little]
        lease.held, lease.free = 15 * scale, 10 * scale
        with pytest.raises(ApiError) as refused:
            await kept.ready("acme", 30, 30 * BILLIONTHS // 1000)
        assert says in refused.value.message
        assert refused.value.retry_after_s == DAY_S - clock.now


async def test_a_day_that_other_routers_have_used_up_ends_at_its_own_midnight() -> None:
    clock, shared = Clock(), Shared()
    kept = DailyQuotas(clock, cast(SharedQuotas, shared))
    kept.set([CustomerConfig(name="acme", tokens_per_day=1000)])
    clock.advance(DAY_S)
    shared.too_little = LeaseKey("acme", "tokens_per_day", 1)
    with pytest.raises(ApiError) as refused:
        await kept.ready("acme", 30, 0)
    assert refused.value.retry_after_s == 2 * DAY_S - clock.now
    kept.count("acme", clock.now, 3, 0)
    assert {key.period: lease.spent for key, lease in shared.leases.items()} == {1: 3}
