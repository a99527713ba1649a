"""Further tries are a share of what clients ask for, above a floor."""

from edge_router.proxied import FLOOR_PER_S, MOST, SHARE, RetryBudget
from tests.edge_router.builders import Clock


def spend(budget: RetryBudget) -> int:
    count = 0
    while budget.withdraw():
        count += 1
    return count


def test_when_everything_fails_tries_are_a_fifth_of_the_requests() -> None:
    budget = RetryBudget(Clock())
    spend(budget)
    granted = 0
    for _ in range(1000):
        budget.deposit()
        granted += budget.withdraw()
    assert abs(granted - SHARE * 1000) <= 2


def test_a_quiet_router_may_still_retry() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    spend(budget)
    assert not budget.withdraw()
    clock.advance(1.0)
    assert spend(budget) == int(FLOOR_PER_S)


def test_what_is_saved_is_bounded_and_a_clock_that_jumps_back_takes_nothing() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    clock.advance(1e9)
    assert budget.left == MOST
    clock.advance(-1e9)
    assert spend(budget) == int(MOST)
    assert spend(budget) == 0
