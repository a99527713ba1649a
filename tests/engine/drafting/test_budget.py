"""The number of drafts that gains most, compared with a search over every number."""

import math

import pytest

from pilotlight.engine.drafting.budget import allot, num_worth_guessing
from tests.engine.drafting.test_costs import measured

FREE = measured({1: 1.0, 100: 1.0})
LINEAR = measured({rows: float(rows) for rows in range(1, 128)})
READS = measured({rows: 10.0 + rows for rows in range(1, 128)})  # reading the weights takes 10, each row 1


def test_where_rows_are_free_all_are_checked() -> None:
    assert allot([[0.5] * 4, [0.1] * 15], FREE, 2, 2) == [4, 15]


def test_where_a_row_costs_as_much_as_a_token_none_is() -> None:
    assert allot([[0.99] * 15], LINEAR, 1, 1) == [0]
    assert allot([[0.99] * 15] * 8, LINEAR, 8, 8) == [0] * 8


def test_likely_drafts_come_before_unlikely_ones_whosever_they_are() -> None:
    first, second = allot([[0.95] * 15, [0.2] * 15], READS, 2, 2)
    assert first > 3 > second


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_number_is_nearly_as_good_as_the_best_there_is(chance: float) -> None:
    def rate(n: int) -> float:
        return (1 + sum(chance**i for i in range(1, n + 1))) / READS.predict_s(1 + n)

    (found,) = allot([[chance] * 15], READS, 1, 1)
    assert rate(found) >= 0.97 * max(rate(n) for n in range(16))


@pytest.mark.parametrize("guess_s", [0.5, 2.0])
@pytest.mark.parametrize("chances", [(0.3,), (0.6, 0.6), (0.9, 0.4), (0.95,)])
def test_as_many_are_guessed_as_are_best_when_each_needs_those_before(
    chances: tuple[float, ...], guess_s: float
) -> None:
    number = len(chances)

    def rate(n: int) -> float:
        right = sum(chance**i for chance in chances for i in range(1, n + 1))
        return (number + right) / (READS.predict_s(number * (1 + n)) + n * guess_s)

    found = num_worth_guessing(chances, guess_s, READS, number, number)
    assert rate(found) >= 0.97 * max(rate(n) for n in range(7))


def test_what_prompts_take_in_the_same_step_makes_no_draft_worth_more() -> None:
    alone = allot([[0.7] * 15], READS, 1, 1)
    beside = allot([[0.7] * 15], READS, 1, 60)
    assert math.isclose(sum(alone), sum(beside), abs_tol=2)
    assert allot([[0.5] * 15], LINEAR, 1, 60) == [0]


def test_drafts_that_were_right_less_often_than_expected_count_for_less() -> None:
    assert allot([[0.9] * 15], READS, 1, 1)[0] > allot([[0.9] * 15], READS, 1, 1, bias=0.3)[0]
    assert allot([[0.9] * 15], READS, 1, 1, bias=0.02) == [0]


def test_a_sequence_that_loses_its_next_turn_needs_more_than_a_likely_draft() -> None:
    assert allot([[0.9], [0.9] * 15], FREE, 2, 2) == [1, 15]
    assert allot([[0.9], [0.9] * 15], FREE, 2, 2, turn_lost=1.0) == [0, 15]
    assert allot([[0.5] * 15] * 2, FREE, 2, 2, turn_lost=1.0) == [0, 0]


def test_turns_that_are_lost_are_taken_off_what_drafts_bring() -> None:
    likely = [[0.7, 0.7]] * 8  # each sequence gains 1.19 expected tokens, but loses its next turn, worth one token
    assert sum(allot(likely, READS, 8, 8)) > 0
    assert allot(likely, READS, 8, 8, turn_lost=1.0) == [0] * 8


def test_nothing_proposed_is_nothing_checked() -> None:
    assert allot([], READS, 3, 3) == []
    assert allot([[], []], READS, 2, 2) == [0, 0]
