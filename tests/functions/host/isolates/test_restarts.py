"""The pauses before isolates that ended badly are replaced."""

import pytest

from pilotlight.functions.host.isolates.restarts import FIRST_PAUSE_S, FREE, MAX_PAUSE_S, PROBATION_S, Restarts


def ended(times: int) -> Restarts:
    restarts = Restarts()
    for _ in range(times):
        restarts.ended_badly(100.0, had_answered=False)
    return restarts


def test_the_first_ones_are_replaced_at_once_and_the_next_after_pauses_that_double_up_to_a_bound() -> None:
    assert [ended(times).pause_s(100.0) for times in range(FREE + 1)] == [0.0] * (FREE + 1)
    pauses = [ended(FREE + 1 + times).pause_s(100.0) for times in range(60)]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)


def test_a_pause_goes_by() -> None:
    restarts = ended(FREE + 3)
    assert restarts.pause_s(100.0 + FIRST_PAUSE_S) == pytest.approx(3 * FIRST_PAUSE_S)
    assert restarts.pause_s(100.0 + 4 * FIRST_PAUSE_S) == 0.0


def test_one_that_has_answered_ends_the_row() -> None:
    restarts = ended(FREE + 10)
    restarts.ended_badly(200.0, had_answered=True)
    assert restarts.pause_s(200.0) == 0.0
    for _ in range(FREE):
        restarts.ended_badly(200.0, had_answered=False)
    assert restarts.pause_s(200.0) == pytest.approx(FIRST_PAUSE_S)


def test_successors_are_on_probation_for_a_while() -> None:
    assert not Restarts().is_on_probation(100.0)
    assert ended(1).is_on_probation(100.0 + PROBATION_S - 0.1)
    assert not ended(1).is_on_probation(100.0 + PROBATION_S)
