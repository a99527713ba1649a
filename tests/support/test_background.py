"""Background work beside requests: its exceptions are logged with their traceback, and it is restarted."""

import asyncio
import logging

import pytest

from pilotlight.support.background import for_each, run_all, running, start, stop


async def test_work_that_raises_is_logged_with_its_traceback_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    starts: list[int] = []
    is_well = asyncio.Event()

    async def work() -> None:
        starts.append(len(starts))
        if len(starts) < 3:
            raise ValueError(f"start {len(starts)}")
        is_well.set()
        await asyncio.Event().wait()

    task = start(work, "the sweep", restart_after_s=0.0)
    await is_well.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(starts) == 3
    assert task.cancelled()
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["start 1", "start 2"]
    assert all("the sweep" in record.getMessage() for record in told)


async def test_work_that_ends_is_not_started_again() -> None:
    starts: list[int] = []

    async def work() -> None:
        starts.append(1)

    await start(work, "a single turn")
    assert starts == [1]


async def test_work_ends_with_its_scope() -> None:
    is_at_work, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        is_at_work.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with running(work, "the feed"):
        await is_at_work.wait()
    assert ended.is_set()


def test_one_item_that_raises_does_not_keep_the_others_from_their_turn(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def look(item: int) -> None:
        if item == 2:
            raise KeyError(item)
        done.append(item)

    for_each([1, 2, 3], look, "looking at a stream")
    assert done == [1, 3]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "looking at a stream" in record.getMessage()


async def test_items_are_worked_on_a_few_at_a_time_and_the_first_error_is_raised() -> None:
    open_items: set[int] = set()
    most = 0

    async def work(item: int) -> None:
        nonlocal most
        open_items.add(item)
        most = max(most, len(open_items))
        await asyncio.sleep(0)
        open_items.remove(item)
        if item == 5:
            raise ValueError("the fifth")

    await run_all(range(5), work, 3)
    assert most == 3
    with pytest.raises(ValueError, match="the fifth"):
        await run_all(range(9), work, 3)


async def test_a_task_that_is_cancelled_while_it_stops_another_ends_as_cancelled() -> None:
    is_stopping = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_stopping.set()
            await asyncio.sleep(0)

    inner = asyncio.create_task(work())
    await asyncio.sleep(0)
    outer = asyncio.create_task(stop(inner))
    await is_stopping.wait()
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    await asyncio.wait({inner})
    assert inner.cancelled()
