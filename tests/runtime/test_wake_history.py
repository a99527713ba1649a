"""Predictions of a model's next wake from its earlier wakes."""

import pytest

from pilotlight.runtime.models.wake_history import RETRY_FAILED_MAX_S, RETRY_FAILED_S, WakeHistory
from pilotlight.wire.errors import ApiError


def test_a_wake_is_expected_as_measured_from_the_same_place_and_guessed_by_size_before() -> None:
    history = WakeHistory()
    assert history.expected_s(False, 10**9) == pytest.approx(1.05)
    assert history.expected_s(True, 8 * 10**9) == pytest.approx(1.05)
    history.note_wake(250.0, was_in_host_memory=True)
    assert history.expected_s(True, 8 * 10**9) == 0.25
    assert history.expected_s(False, 10**9) == pytest.approx(1.05), "from the disk it has not been measured"
    assert (history.wakes, history.last_ms) == (1, 250.0)


def test_failures_in_a_row_are_given_up_for_longer_and_longer() -> None:
    now = [1000.0]
    history = WakeHistory(clock=lambda: now[0])
    for patience_s in (RETRY_FAILED_S, 2 * RETRY_FAILED_S, 4 * RETRY_FAILED_S):
        history.failed_at = now[0]
        history.note_failure(ApiError("model_load_failed", "its disk is gone"))
        assert history.has_failed_lately
        now[0] += patience_s - 0.1
        assert history.is_given_up
        now[0] += 0.2
        assert not history.is_given_up
    for _ in range(20):
        history.note_failure(ApiError("model_load_failed", "its disk is gone"))
    history.failed_at = now[0]
    now[0] += RETRY_FAILED_MAX_S + 0.1
    assert not history.is_given_up
    history.note_wake(5.0, was_in_host_memory=False)
    assert history.failures == 0


def test_a_failure_for_want_of_a_host_is_no_fault_of_the_model() -> None:
    history = WakeHistory()
    assert not history.lacked_a_host
    history.note_failure(ApiError("model_load_failed", "its disk is gone"))
    assert not history.lacked_a_host
    history.note_failure(ApiError("overloaded", "no host starts"))
    assert history.lacked_a_host
