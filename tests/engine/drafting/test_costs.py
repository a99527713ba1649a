"""The measured cost of steps by number of rows: it is used after some measurements, and never falls with more rows."""

from random import Random

import pytest

from pilotlight.engine.drafting.costs import StepCosts


def measured(by_rows: dict[int, float], times: int = 8) -> StepCosts:
    costs = StepCosts()
    for _ in range(times):
        for rows, seconds in by_rows.items():
            costs.count(rows, seconds)
    return costs


def test_a_size_is_believed_when_it_was_measured_a_few_times() -> None:
    assert not measured({4: 0.1}, times=5).is_known
    assert measured({4: 0.1}, times=6).predict_s(4) == 0.1


def test_between_two_sizes_there_is_a_line_and_beyond_a_hope() -> None:
    costs = measured({1: 0.1, 9: 0.3})
    assert costs.predict_s(5) == pytest.approx(0.2)
    assert costs.predict_s(1) == costs.predict_s(0.5) == 0.1
    assert 0.3 < costs.predict_s(18) < 0.6


def test_a_first_step_that_took_long_is_forgotten_and_one_in_between_hardly_counts() -> None:
    costs = StepCosts()
    costs.count(2, 9.0)
    for _ in range(6):
        costs.count(2, 0.1)
    assert costs.predict_s(2) == 0.1
    costs.count(2, 9.0)
    assert costs.predict_s(2) == pytest.approx(0.105)
    for _ in range(200):
        costs.count(2, 0.4)
    assert costs.predict_s(2) == pytest.approx(0.4, rel=0.05), "a lasting change is learnt"


def test_a_shorter_step_counts_for_half_at_once() -> None:
    costs = measured({2: 0.4}, times=8)
    costs.count(2, 0.2)
    assert costs.predict_s(2) == pytest.approx(0.3)
    assert costs.predict_s(4) == pytest.approx(0.3 + 2 * 0.3 / 10), "beyond, each row adds its lowest possible cost"


def test_more_rows_never_take_less() -> None:
    draw = Random(3)
    costs = measured({rows: draw.uniform(0.1, 1.0) for rows in (1, 2, 3, 5, 9, 17, 40, 100, 333)})
    predicted = [costs.predict_s(rows) for rows in range(1, 600)]
    assert predicted == sorted(predicted)


def test_steps_with_drafts_are_measured_apart_and_predicted_from_those_without_until_then() -> None:
    costs = measured({4: 0.1, 12: 0.2})
    assert costs.predict_s(8, num_drafts=4) == pytest.approx(0.15)
    for _ in range(8):
        costs.count(12, 0.5, num_drafts=8)
    assert costs.predict_s(12) == pytest.approx(0.2)
    assert costs.predict_s(12, num_drafts=8) == pytest.approx(0.5)
    assert costs.predict_s(8, num_drafts=4) == pytest.approx(0.3), "half way to the cost of four rows without drafts"
    assert costs.predict_s(20, num_drafts=8) > 0.5
