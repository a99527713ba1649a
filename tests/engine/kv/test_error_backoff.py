"""Growing pauses between retries after errors, with a fake clock."""

import logging

import pytest

from pilotlight.engine.kv.error_backoff import ErrorBackoff
from tests.clock import Clock


def test_errors_in_a_row_are_followed_by_pauses_that_double_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    backoff = ErrorBackoff("the disk", "read", clock)
    for _ in range(2):
        backoff.fail("input/output error")
        assert not backoff.is_trying
    for pause_s in (10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0):
        backoff.fail("input/output error")
        clock.now += pause_s - 0.1
        assert backoff.is_exhausted
        clock.now += 0.2
        assert not backoff.is_exhausted
        assert backoff.is_trying
    assert backoff.num_errors == 9
    assert caplog.text.count("the disk is no longer read after 3 consecutive errors; the last error: input/output") == 1


def test_one_success_ends_the_row_and_is_reported_if_there_were_pauses(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    backoff = ErrorBackoff("the disk", "read", clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            backoff.fail("no")
            backoff.fail("no")
            backoff.succeed()
        assert not backoff.is_trying
        assert not caplog.messages
        for _ in range(3):
            backoff.fail("no")
        backoff.succeed()
    assert caplog.messages[-1] == "the disk is read again"
    assert not backoff.is_exhausted
