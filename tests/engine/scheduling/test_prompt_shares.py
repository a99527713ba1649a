"""The division of a step's prompt tokens: by priority, equally among tenants over several steps, and completely."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.scheduling.fairness import AGEING_ADMISSIONS
from pilotlight.engine.scheduling.prompt_shares import Owner, PromptShares
from tests.engine.scheduling.references import num_kept

BLOCK = 16
MUCH = 10**9

owners = st.tuples(st.integers(-2, 2), st.sampled_from([b"a", b"b", b"c"]))


@given(
    st.integers(0, 3000),
    st.dictionaries(owners, st.integers(0, 3000), max_size=8),
    st.sets(st.integers(-2, 2), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_no_owner_gets_more_than_it_wants_and_nothing_wanted_is_left(
    budget: int, wanted: dict[Owner, int], waiting: set[int]
) -> None:
    shares = PromptShares(BLOCK).divide(budget, wanted, waiting)
    assert all(0 <= shares[owner] <= wanted[owner] for owner in shares)
    assert sum(shares.values()) <= budget
    if not waiting:
        assert sum(shares.values()) == min(budget, sum(wanted.values()))


def divided(steps: int, budget: int, *wanting: Owner, shares: PromptShares | None = None) -> Counter[Owner]:
    """Return the tokens of each owner after `steps` steps in which all want more than `budget`."""
    shares = shares or PromptShares(BLOCK)
    total: Counter[Owner] = Counter()
    for _ in range(steps):
        total += shares.divide(budget, dict.fromkeys(wanting, MUCH))
    return total


@pytest.mark.parametrize("budget", [1, 16, 40, 170, 2048])
def test_tenants_of_one_priority_get_the_same_even_where_a_step_has_fewer_blocks_than_there_are_tenants(
    budget: int,
) -> None:
    total = divided(100, budget, *((0, b"%d" % i) for i in range(10)))
    assert sum(total.values()) == 100 * budget
    assert max(total.values()) - min(total.values()) <= max(BLOCK, budget // 16)


@pytest.mark.parametrize("budget", [16, 170, 2048])
def test_the_most_urgent_get_nearly_all_and_none_starves(budget: int) -> None:
    total = divided(160, budget, (-8, b"urgent"), (0, b"usual"), (5, b"patient"))
    most = 160 * budget
    assert total[-8, b"urgent"] >= most * (1 - 2 / AGEING_ADMISSIONS) - 2048
    for lesser in ((0, b"usual"), (5, b"patient")):
        assert abs(total[lesser] - most / (AGEING_ADMISSIONS + 2)) <= max(BLOCK, budget // 16) * 2


def test_a_tenant_gains_nothing_by_more_priorities_than_one_below_the_most_urgent() -> None:
    total = divided(100, 2048, (-1, b"a"), (0, b"b"), (0, b"c"))
    assert abs(total[0, b"b"] - total[0, b"c"]) <= 128
    assert total[-1, b"a"] > 10 * (total[0, b"b"] + total[0, b"c"])


def test_an_absence_saves_up_nothing() -> None:
    shares = PromptShares(BLOCK)
    divided(100, 64, (0, b"steady"), shares=shares)
    both = divided(10, 64, (0, b"back"), (0, b"steady"), shares=shares)
    assert abs(both[0, b"back"] - both[0, b"steady"]) <= 2 * BLOCK


def test_what_was_had_too_much_is_remembered() -> None:
    shares = PromptShares(BLOCK)
    usual, patient = (0, b"usual"), (5, b"patient")
    assert shares.divide(BLOCK, {usual: MUCH, patient: MUCH}) == {usual: BLOCK}
    assert shares.divide(BLOCK, {usual: MUCH, patient: MUCH}) == {patient: BLOCK}, "it has had no tokens yet"
    for _ in range(AGEING_ADMISSIONS - 1):
        assert shares.divide(BLOCK, {usual: MUCH, patient: MUCH}) == {usual: BLOCK}


def test_an_absence_ends_no_debt() -> None:
    shares = PromptShares(BLOCK)
    usual, patient = (0, b"usual"), (5, b"patient")
    while not shares.divide(BLOCK, {usual: MUCH, patient: MUCH})[patient]:
        pass
    shares.divide(BLOCK, {usual: MUCH})
    assert divided(AGEING_ADMISSIONS - 2, BLOCK, usual, patient, shares=shares)[patient] == 0


def test_newcomers_one_after_the_other_do_not_starve_earlier_ones() -> None:
    """Each newcomer wants a block of tokens, which is also the budget of a step."""
    shares = PromptShares(BLOCK)
    steady = [
        shares.divide(BLOCK, {(0, b"steady"): MUCH, (0, b"guest %d" % i): BLOCK})[0, b"steady"] for i in range(100)
    ]
    assert sum(steady) >= 50 * BLOCK


def test_those_who_wait_have_one_share_together_which_is_left() -> None:
    shares = PromptShares(BLOCK)
    assert shares.divide(2048, {(0, b"a"): MUCH}, waiting={0}) == {(0, b"a"): 1024}
    assert shares.divide(2048, {(0, b"a"): MUCH, (0, b"b"): MUCH, (0, b"c"): MUCH}, waiting={0}).total() == 1536
    assert shares.divide(2048, {(0, b"a"): MUCH}, waiting={-8})[0, b"a"] <= 2 * 2048 // AGEING_ADMISSIONS
    assert shares.divide(100, {}, waiting={0}) == {}


def test_tenants_that_are_gone_are_forgotten() -> None:
    shares = PromptShares(BLOCK)
    guests = [b"guest %d" % i for i in range(1000)]
    for i in range(1000):
        shares.divide(2 * BLOCK, {(0, guests[i]): MUCH, (0, b"steady"): MUCH})
    assert num_kept(guests) <= 70
