"""The policies of residency, with a given clock and candidates: which models sleep, when, and which are expected."""

import random

import pytest

from pilotlight.runtime.models.demand import HOUR_S, NEVER_S, Arrivals
from pilotlight.runtime.models.residency import (
    LONGEST_STAY_S,
    EvictionCandidate,
    EvictionPlan,
    cheapest,
    could_ever_fit,
    make_room,
    must_yield,
)


def candidate(name: str, num_bytes: int = 10, **fields: object) -> EvictionCandidate:
    return EvictionCandidate(name, num_bytes, **fields)


def test_no_model_sleeps_while_there_is_room() -> None:
    assert make_room(10, 30, [candidate("a"), candidate("b")]) == EvictionPlan()
    assert make_room(10**12, None, [candidate("a")]) == EvictionPlan()


def test_what_is_used_least_sleeps_first() -> None:
    held = [candidate("often", next_use_s=1.0), candidate("rarely", next_use_s=1000.0), candidate("never")]
    assert make_room(10, 30, held).evict == ("never",)
    assert make_room(20, 30, held).evict == ("never", "rarely")


def test_what_wakes_fast_sleeps_before_what_wakes_slowly() -> None:
    held = [candidate("slow", wake_s=20.0, next_use_s=60.0), candidate("fast", wake_s=0.1, next_use_s=60.0)]
    assert make_room(10, 20, held).evict == ("fast",)


def test_priority_comes_before_everything() -> None:
    held = [candidate("dear", priority=1), candidate("often", next_use_s=0.1)]
    assert make_room(10, 20, held).evict == ("often",)


def test_the_pinned_and_the_busy_stay() -> None:
    held = [candidate("pinned", is_pinned=True), candidate("busy", is_busy=True)]
    assert make_room(10, 20, held) == EvictionPlan(is_possible=False, wait_s=None)
    assert not could_ever_fit(20, 20, held)
    assert could_ever_fit(10, 20, held)


def test_a_model_that_has_just_woken_stays_for_three_times_its_waking() -> None:
    held = [candidate("new", wake_s=2.0, awake_for_s=1.0), candidate("newer", wake_s=2.0, awake_for_s=0.5)]
    assert make_room(10, 20, held) == EvictionPlan(is_possible=False, wait_s=5.0)
    assert make_room(10, 20, [candidate("old", wake_s=2.0, awake_for_s=6.0), held[0]]).evict == ("old",)
    assert candidate("huge", wake_s=1000.0, awake_for_s=0.0).stays_for_s == LONGEST_STAY_S


def test_two_models_cannot_throw_each_other_out_more_often_than_waking_is_worth() -> None:
    """A and B take turns on room for one. With the minimum stay, waking takes at most a quarter of the time."""
    now, waking_s, awake, woken_at = 0.0, 0.0, "a", 0.0
    while now < 100.0:
        wants = "b" if awake == "a" else "a"
        plan = make_room(10, 10, [candidate(awake, wake_s=0.5, awake_for_s=now - woken_at)])
        if plan.evict:
            awake, woken_at, waking_s, now = wants, now + 0.5, waking_s + 0.5, now + 0.5
        else:
            assert plan.wait_s is not None
            now += plan.wait_s
    assert waking_s <= 0.25 * now + 0.5


def test_no_more_sleep_than_must() -> None:
    held = [candidate("small", 1, next_use_s=1e9), candidate("large", 100, next_use_s=1e3)]
    assert make_room(50, 101, held).evict == ("large",), "the small one's bytes would not have helped"
    assert cheapest(102, held) is None


def test_no_model_sleeps_beside_one_that_suffices_to_the_byte() -> None:
    held = [candidate("small", 1, next_use_s=1e9), candidate("large", 50, next_use_s=1e3)]
    assert cheapest(50, held) == ("large",)
    assert cheapest(51, held) == ("small", "large")
    assert make_room(10, 61, held) == EvictionPlan()


def test_random_plans_keep_every_promise() -> None:
    chance = random.Random(7)
    for _ in range(500):
        held = [
            candidate(
                f"m{i}", chance.randint(1, 50), is_pinned=chance.random() < 0.2, is_busy=chance.random() < 0.3,
                priority=chance.randint(-1, 1), awake_for_s=chance.choice([0.0, 1.0, 100.0]), wake_s=chance.choice([0.01, 1.0, 30.0]),
                next_use_s=chance.choice([0.1, 10.0, 1e9]),
            )
            for i in range(chance.randint(0, 8))
        ]  # fmt: skip
        budget, needed = chance.randint(20, 200), chance.randint(1, 80)
        plan = make_room(needed, budget, held)
        named = {each.name: each for each in held}
        total = sum(each.num_bytes for each in held)
        gone = [named[name] for name in plan.evict]
        assert all(not each.is_pinned and not each.is_busy and each.stays_for_s == 0 for each in gone)
        if plan.is_possible:
            assert total - sum(each.num_bytes for each in gone) + needed <= budget
            for each in gone:
                assert total - sum(g.num_bytes for g in gone) + each.num_bytes + needed > budget, "one too many"
        else:
            able = sum(e.num_bytes for e in held if not e.is_pinned and not e.is_busy and e.stays_for_s == 0)
            assert total - able + needed > budget


def test_who_must_yield_may_be_busy_but_not_pinned() -> None:
    held = [candidate("pinned", is_pinned=True), candidate("busy", is_busy=True, next_use_s=0.01)]
    assert must_yield(10, 20, held) == ("busy",)


def test_a_model_that_was_never_used_is_not_expected() -> None:
    assert Arrivals().expected_in_s(1000.0) == NEVER_S
    assert not Arrivals().is_due(1000.0, 60.0)


def test_a_faster_rate_is_expected_sooner_and_silence_later() -> None:
    fast, slow = Arrivals(), Arrivals()
    for i in range(20):
        fast.note(10.0 * i)
        slow.note(60.0 * i)
    assert fast.expected_in_s(190.0) == pytest.approx(10.0)
    assert fast.expected_in_s(250.0) == pytest.approx(60.0), "silent for longer than its gap"
    assert slow.expected_in_s(60.0 * 19) > fast.expected_in_s(190.0)


def test_a_rhythm_is_due_shortly_before_its_next_beat() -> None:
    arrivals = Arrivals()
    for i in range(20):
        arrivals.note(100.0 + 300.0 * i)
    last = 100.0 + 300.0 * 19
    assert not arrivals.is_due(last + 100.0, 5.0)
    assert arrivals.is_due(last + 296.0, 5.0)
    assert not arrivals.is_due(last + 500.0, 5.0), "it has missed its beat"


def test_chance_is_no_rhythm() -> None:
    chance, arrivals, now = random.Random(1), Arrivals(), 0.0
    for _ in range(200):
        now += chance.expovariate(1 / 300.0)
        arrivals.note(now)
    due = sum(arrivals.is_due(now + 10.0 * i, 5.0) for i in range(1, 60))
    assert due <= 2


def test_the_hour_of_the_day_is_remembered() -> None:
    arrivals = Arrivals()
    for day in range(4):
        for i in range(30):  # nine to ten o'clock, every two minutes
            arrivals.note((24 * day + 9) * HOUR_S + 120.0 * i)
    before_nine = (24 * 4 + 9) * HOUR_S - 20.0
    assert not arrivals.is_due(before_nine - 2 * HOUR_S, 30.0)
    assert arrivals.is_due(before_nine, 30.0)
    at_nine = arrivals.expected_in_s(before_nine + 25.0)
    assert at_nine == pytest.approx(120.0)
    assert not arrivals.is_due(before_nine + 3 * HOUR_S, 30.0)
    assert arrivals.expected_in_s(before_nine + 5 * HOUR_S) > 10 * at_nine


def test_years_of_silence_cost_no_time() -> None:
    arrivals = Arrivals()
    arrivals.note(0.0)
    assert arrivals.expected_in_s(10 * 365 * 24 * HOUR_S) > 24 * HOUR_S
