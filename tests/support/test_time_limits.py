"""A time limit holds, and leaves out the time in which the process was stopped."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from pilotlight.support.time_limits import Pauses, TimeLimit, done_within
from tests.simulation.virtual_time import Process, VirtualLoop

ANSWERS_AFTER_S, LIMIT_S, STOPPED_S = 1.0, 2.0, 5.0


def run(work: Coroutine[Any, Any, None], stopped_after_s: Sequence[float] = (), stopped_s: float = STOPPED_S) -> float:
    """Run work in a process that is stopped at times for `stopped_s`; return the time that it took. Raises its error."""
    loop, process = VirtualLoop(), Process("router", "127.0.0.1")
    try:
        started, task = loop.time(), loop.start(process, work)
        for after_s in stopped_after_s:
            loop.call_later(after_s, loop.suspend, process)
            loop.call_later(after_s + stopped_s, loop.resume, process)
        loop.run_until_complete(task)
        return loop.time() - started
    finally:
        loop.close()


def answer_after(seconds: float) -> "asyncio.Future[None]":
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    loop.call_later(seconds, lambda: answer.done() or answer.set_result(None))
    return answer


async def answered_after(seconds: float, limit_s: float = LIMIT_S) -> None:
    async with TimeLimit(limit_s):
        await answer_after(seconds)


def test_an_answer_in_time_is_taken() -> None:
    assert run(answered_after(ANSWERS_AFTER_S)) == ANSWERS_AFTER_S


def test_a_late_answer_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        run(answered_after(LIMIT_S + 1.0))


def test_an_answer_that_came_while_the_process_was_stopped_is_taken() -> None:
    assert run(answered_after(ANSWERS_AFTER_S), stopped_after_s=[0.5]) == 0.5 + STOPPED_S


def test_a_limit_holds_after_a_stop() -> None:
    with pytest.raises(TimeoutError):
        run(answered_after(60.0), stopped_after_s=[0.5])


def test_a_process_that_is_often_late_keeps_its_limits() -> None:
    with pytest.raises(TimeoutError):
        run(answered_after(50.0), stopped_after_s=range(1, 60, 3), stopped_s=1.0)


def test_a_stop_that_ends_before_the_limit_counts_as_no_silence() -> None:
    assert run(answered_after(10.0, limit_s=8.0), stopped_after_s=[0.5]) == 10.0
    with pytest.raises(TimeoutError):
        run(answered_after(10.0, limit_s=8.0))


def test_a_limit_of_several_waits_is_one_time_for_all() -> None:
    async def in_parts(seconds: float) -> None:
        limit = TimeLimit(LIMIT_S)
        for _ in range(3):
            async with limit:
                await answer_after(seconds)

    assert run(in_parts(0.6)) == pytest.approx(1.8)
    with pytest.raises(TimeoutError):
        run(in_parts(0.7))
    assert run(in_parts(0.6), stopped_after_s=[0.9]) == pytest.approx(0.9 + STOPPED_S + 0.6)


@pytest.mark.parametrize(("takes_s", "is_done"), [(LIMIT_S - 0.5, True), (LIMIT_S + 0.5, False)])
def test_work_is_awaited_for_a_while_and_left_alone(takes_s: float, is_done: bool) -> None:
    async def awaited() -> None:
        work = answer_after(takes_s)
        assert await done_within(LIMIT_S, work) is is_done
        await work

    assert run(awaited()) == takes_s


def test_silence_before_the_end_of_a_pause_is_nobodys() -> None:
    pauses = Pauses(0.5, late_s=0.2)
    assert pauses.silent_s(since=-30.0, now=0.0) == 30.0
    assert pauses.silent_s(since=-30.0, now=0.6) == 30.6, "a check that is a little late"
    assert pauses.silent_s(since=-30.0, now=2.0) == 0.0, "no check was made in time"
    assert pauses.silent_s(since=-30.0, now=2.5) == 0.5
    assert pauses.silent_s(since=2.3, now=2.5) == pytest.approx(0.2)


def test_a_cancellation_from_outside_stays_one() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(answered_after(ANSWERS_AFTER_S))
        asyncio.get_running_loop().call_later(0.5, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
