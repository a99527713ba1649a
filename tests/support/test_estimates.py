"""The error of predictions, which falls with time."""

import pytest

from pilotlight.support.estimates import ERROR_HALVES_S, FIRST_ERROR, PredictionError


def test_an_error_of_predictions_fades() -> None:
    now = [100.0]
    error = PredictionError(lambda: now[0])
    assert error.share == FIRST_ERROR
    error.note(1000.0)
    first = error.share
    assert first > 2.0
    now[0] += ERROR_HALVES_S
    assert error.share == pytest.approx(FIRST_ERROR + (first - FIRST_ERROR) / 2)
    for _ in range(50):
        error.note(0.1)
    assert error.share == pytest.approx(FIRST_ERROR, rel=1e-3), "a prompt that was early is no reason for trust"
