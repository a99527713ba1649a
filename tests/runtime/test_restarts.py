"""Restarts after deaths of a device's hosts: pauses that double, a fresh start after crashes, and giving up after three."""

from pilotlight.runtime.hosts.device_host import (
    AFRESH_AFTER,
    FIRST_PAUSE_S,
    HOPELESS_AFTER,
    LONGEST_PAUSE_S,
    RestartHistory,
)


def test_the_first_death_costs_no_pause_and_later_ones_ever_more_up_to_a_bound() -> None:
    history = RestartHistory()
    pauses = []
    for number in range(12):
        history.note_death(f"death {number}")
        history.note_exit()
        pauses.append(history.pause_s)
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert history.last_death == "death 11"


def test_there_is_hope_again_when_a_host_answers_or_has_lived() -> None:
    for live in (RestartHistory.note_answer, RestartHistory.note_long_life):
        history = RestartHistory()
        for _ in range(HOPELESS_AFTER):
            assert not history.is_hopeless
            history.note_exit()
        assert history.is_hopeless
        live(history)
        assert (history.is_hopeless, history.pause_s) == (False, 0.0)


def test_hosts_that_are_killed_at_work_do_not_count_as_hosts_that_do_not_start() -> None:
    history = RestartHistory()
    for _ in range(2 * HOPELESS_AFTER):
        history.note_exit(has_computed=True)
        assert (history.is_hopeless, history.pause_s) == (False, 0.0)
    for has_crashed in (True, False):  # each host crashes while it computes, or ends before it computes
        history = RestartHistory()
        for _ in range(HOPELESS_AFTER):
            history.note_exit(has_crashed=has_crashed, has_computed=has_crashed)
        assert history.is_hopeless


def test_hosts_that_are_killed_from_outside_lengthen_the_pause_and_do_not_make_a_start_hopeless() -> None:
    history = RestartHistory()
    for _ in range(2 * HOPELESS_AFTER):
        history.note_exit(was_killed=True)
    assert (history.is_hopeless, history.pause_s) == (False, 16 * FIRST_PAUSE_S)
    for _ in range(HOPELESS_AFTER):
        assert not history.is_hopeless
        history.note_failure()
    assert history.is_hopeless


def test_crashes_in_a_row_ask_for_a_start_afresh_and_another_end_forgets_them() -> None:
    history = RestartHistory()
    for _ in range(AFRESH_AFTER):
        assert not history.wants_afresh
        history.note_exit(has_crashed=True)
    assert history.wants_afresh
    history.note_exit()
    assert not history.wants_afresh
