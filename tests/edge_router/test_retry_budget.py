"""Retries are a share of clients' requests, above a floor."""

from pilotlight.edge_router.forwarding.request_state import (
    ACCOUNT_FLOOR_PER_S,
    ACCOUNT_MOST,
    FLOOR_PER_S,
    MAX_ACCOUNTS,
    MOST,
    SHARE,
    SHARED_ABOVE,
    RetryBudget,
)
from tests.edge_router.builders import Clock
from tests.memory import bytes_kept_by


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


def test_an_account_whose_requests_fail_everywhere_leaves_the_others_their_shares() -> None:
    for saved_s in (0.0, 1e6):
        clock = Clock()
        budget = RetryBudget(clock)
        clock.advance(saved_s)
        for _ in range(1000):
            budget.withdraw("a")
        assert not budget.withdraw("a")
        assert sum(budget.withdraw("b") for _ in range(100)) == ACCOUNT_MOST
        clock.advance(1.0)
        assert sum(budget.withdraw("a") for _ in range(100)) == ACCOUNT_FLOOR_PER_S


def test_a_lone_account_takes_what_the_others_do_not_need() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    clock.advance(1e6)
    assert sum(budget.withdraw("a") for _ in range(1000)) == MOST - SHARED_ABOVE + ACCOUNT_MOST


def test_an_account_s_share_grows_with_its_requests() -> None:
    budget = RetryBudget(Clock())
    while budget.withdraw("a"):
        pass
    granted = 0
    for _ in range(200):
        budget.deposit("a")
        granted += budget.withdraw("a")
    assert abs(granted - SHARE * 200) <= 2


def test_the_shares_of_accounts_are_bounded() -> None:
    def kept_of(num_accounts: int) -> int:
        budget = RetryBudget(Clock())

        def deposit() -> None:
            for number in range(num_accounts):
                budget.deposit(str(number))

        return bytes_kept_by(deposit)

    assert kept_of(4 * MAX_ACCOUNTS) < 2 * kept_of(MAX_ACCOUNTS)
