"""One timer for all waits: how often it checks which requests, and the effect of a pause of this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pilotlight.edge_router.forwarding.timeouts import LOOKED_AT_ONCE, SilenceWatch

NEVER = float("-inf")


class Waiting:
    def __init__(self) -> None:
        self.looks: list[tuple[float, float]] = []
        self.leaving: set[Waiting] | None = None  # requests that end when this one is checked

    def look(self, now: float, awake_since: float) -> None:
        self.looks.append((now, awake_since))
        if self.leaving is not None:
            self.leaving.clear()


@asynccontextmanager
async def running(watch: SilenceWatch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_waits_are_looked_at_repeatedly_and_ended_ones_are_not() -> None:
    watch = SilenceWatch(0.001)
    all_of_them = [Waiting() for _ in range(2 * LOOKED_AT_ONCE + 1)]
    watch.watched.update(all_of_them)
    async with running(watch):
        while min(len(each.looks) for each in all_of_them) < 2:
            await asyncio.sleep(0.001)
        watch.watched.discard(all_of_them[0])
        seen, others = len(all_of_them[0].looks), len(all_of_them[1].looks)
        while len(all_of_them[1].looks) < others + 2:
            await asyncio.sleep(0.001)
    assert len(all_of_them[0].looks) == seen
    assert max(since for each in all_of_them for _, since in each.looks) == NEVER


async def test_one_whose_look_raises_is_logged_and_the_time_limits_of_the_others_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = SilenceWatch(0.001)

    class Raising(Waiting):
        def look(self, now: float, awake_since: float) -> None:
            super().look(now, awake_since)
            raise ValueError("a policy's mistake")

    raising, others = Raising(), [Waiting() for _ in range(8)]
    watch.watched.update([raising, *others])
    async with running(watch):
        while min(len(each.looks) for each in others) < 2:
            await asyncio.sleep(0.001)
    assert len(raising.looks) >= 2
    assert "a policy's mistake" in caplog.text


async def test_whatever_else_has_come_goes_between() -> None:
    watch, num_turns, at_turns = SilenceWatch(0.001), 0, list[int]()

    class Noting(Waiting):
        def look(self, now: float, awake_since: float) -> None:
            at_turns.append(num_turns)

    watch.watched.update(Noting() for _ in range(3 * LOOKED_AT_ONCE))
    async with running(watch):
        while len(at_turns) < 3 * LOOKED_AT_ONCE:
            num_turns += 1
            await asyncio.sleep(0)
    firsts = at_turns[: 3 * LOOKED_AT_ONCE : LOOKED_AT_ONCE]
    assert firsts[0] < firsts[1] < firsts[2]


async def test_a_wait_that_ends_while_others_are_looked_at_is_not_looked_at_any_more() -> None:
    watch = SilenceWatch(0.001)
    each_ends_the_others: list[Waiting] = [Waiting() for _ in range(LOOKED_AT_ONCE // 2)]
    for each in each_ends_the_others:
        each.leaving = watch.watched
    watch.watched.update(each_ends_the_others)
    async with running(watch):
        while watch.watched:
            await asyncio.sleep(0.001)
    assert sum(len(each.looks) for each in each_ends_the_others) == 1


async def test_a_standstill_of_this_process_is_reported_and_ordinary_delays_are_not() -> None:
    watch, waiting = SilenceWatch(0.001, standstill_s=0.05), Waiting()
    watch.watched.add(waiting)
    async with running(watch):
        while not waiting.looks:
            await asyncio.sleep(0.001)
        before = time.monotonic()
        time.sleep(0.08)  # noqa: ASYNC251
        stood_until = time.monotonic()
        while waiting.looks[-1][1] < stood_until:  # a busy machine may have paused earlier, too
            await asyncio.sleep(0.001)
    now, awake_since = waiting.looks[-1]
    assert before < stood_until <= awake_since <= now
