"""The definition of progress, by which a host counts as alive, and how long a busy host may have none."""

import pytest

from pilotlight.engine.api.protocol import ModelLoad, StepOutput, TokenOutput
from pilotlight.runtime.hosts.device_host import ProgressWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> ProgressWatch:
    watch = ProgressWatch(start_timeout_s=30.0, step_deadline_s=5.0, clock=clock)
    watch.begin()
    return watch


def frame(step: int, *outputs: TokenOutput) -> StepOutput:
    return StepOutput(step, outputs, {})


def test_a_host_without_work_is_never_stuck(watch: ProgressWatch, clock: Clock) -> None:
    watch.note_step(frame(0))
    clock.now += 1000.0
    assert watch.why_stuck() is None


def test_one_that_is_not_ready_yet_has_longer_than_one_that_is(watch: ProgressWatch, clock: Clock) -> None:
    with watch.expected():
        clock.now += 3.0
        watch.note_step(frame(0))  # the host sends heartbeats while it imports
        clock.now += 29.9
        assert watch.why_stuck() is None
        clock.now += 0.2
        assert watch.why_stuck() == "the engine host was not ready within 30 s"
        watch.note_ready()
        clock.now += 5.0
        assert watch.why_stuck() is None
        clock.now += 0.1
        assert watch.why_stuck() == "the engine host has work and took no step for 5 s"


def test_a_host_is_not_stuck_because_this_process_was_stopped(watch: ProgressWatch, clock: Clock) -> None:
    watch.note_ready()
    with watch.expected():
        clock.now += 60.0
        assert watch.why_stuck(awake_since=clock.now - 5.0) is None
        assert watch.why_stuck(awake_since=clock.now - 5.1) is not None


def test_heartbeats_and_errors_are_no_progress_but_steps_answers_and_bytes_are(
    watch: ProgressWatch, clock: Clock
) -> None:
    watch.note_ready()
    watch.note_step(frame(1))
    with watch.expected():
        clock.now += 5.1
        assert not watch.note_step(frame(1))
        assert not watch.note_step(frame(1, TokenOutput("a", finish_reason="error")))
        assert watch.why_stuck() is not None
        for note in (
            lambda: watch.note_step(frame(2)),
            lambda: watch.note_step(frame(2, TokenOutput("a", (5,)))),
            watch.note_bytes,
        ):
            note()
            assert watch.why_stuck() is None
            clock.now += 5.1
            assert watch.why_stuck() is not None


def test_a_step_without_outputs_is_work_and_a_heartbeat_is_none(watch: ProgressWatch) -> None:
    watch.note_step(frame(0))
    watch.note_step(frame(0))
    watch.note_step(frame(1, TokenOutput("a", finish_reason="error")))
    assert not watch.has_computed
    watch.note_step(frame(2))
    assert watch.has_computed
    watch.begin()
    assert not watch.has_computed


def test_it_is_quiet_since_its_last_work_ended_once_it_has_spoken(watch: ProgressWatch, clock: Clock) -> None:
    assert watch.quiet_since is None
    watch.note_step(frame(0))
    assert watch.quiet_since == 100.0
    with watch.expected():
        assert watch.quiet_since is None
        clock.now += 3.0
    assert watch.quiet_since == 103.0
    watch.end()
    assert watch.quiet_since is None


def test_a_machine_that_is_measured_to_be_slow_has_ten_times_its_largest_step(clock: Clock) -> None:
    watch = ProgressWatch(start_timeout_s=30.0, step_deadline_s=5.0, largest_step=2048, clock=clock)
    watch.begin()
    watch.note_ready()
    loads = {"fast": ModelLoad(prefill_tokens_per_s=10_000.0), "slow": ModelLoad(prefill_tokens_per_s=512.0)}
    watch.note_step(StepOutput(1, (), loads))
    with watch.expected():
        clock.now += 39.9
        assert watch.why_stuck() is None
        clock.now += 0.2
        assert watch.why_stuck() == "the engine host has work and took no step for 40 s"


def test_a_machine_whose_first_step_never_ends_in_time_has_twice_as_long_each_time(clock: Clock) -> None:
    """Nothing is measured until a step has ended. A fixed deadline would end every host of a slow machine."""
    watch = ProgressWatch(start_timeout_s=30.0, step_deadline_s=5.0, largest_step=2048, clock=clock)
    for deadline_s in (5.0, 10.0, 20.0, 40.0):
        watch.begin()
        watch.note_ready()
        with watch.expected():
            clock.now += deadline_s - 0.1
            assert watch.why_stuck() is None
            clock.now += 0.2
            assert watch.why_stuck() is not None
            watch.note_late()
    watch.begin()
    watch.note_step(frame(1, TokenOutput("a", (5,))))
    assert watch.step_deadline_s == 5.0, "it has answered"


def test_a_host_that_is_not_ready_in_time_says_nothing_about_steps(clock: Clock) -> None:
    watch = ProgressWatch(start_timeout_s=30.0, step_deadline_s=5.0, clock=clock)
    watch.begin()
    watch.note_late()
    assert watch.step_deadline_s == 5.0
