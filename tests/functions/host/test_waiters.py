"""Requests that wait for an isolate: the limit of their number, and how they are woken up."""

import asyncio

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.waiters import Waiters


async def waiting(waiters: Waiters, number: int) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.ensure_future(waiters.wait()) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def test_as_many_wait_as_may_and_all_are_woken() -> None:
    waiters = Waiters("f", 2)
    tasks = await waiting(waiters, 2)
    assert waiters.count == 2
    with pytest.raises(Failure, match="all isolates of 'f' are busy") as refused:
        await waiters.wait()
    assert (refused.value.code, refused.value.status, waiters.count) == ("overloaded", 503, 2)
    waiters.notify()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert waiters.count == 0
    (again,) = await waiting(waiters, 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not again.done(), "an earlier notification does not wake it"
    again.cancel()
    await asyncio.wait({again})
    assert waiters.count == 0


async def test_a_waiter_continues_after_some_time_without_news() -> None:
    waiters = Waiters("f", 1)
    await asyncio.wait_for(waiters.wait(0.01), 60)
    assert waiters.count == 0


async def test_no_request_starts_to_wait_if_no_isolate_will_come() -> None:
    waiters = Waiters("f", 1)
    (task,) = await waiting(waiters, 1)
    waiters.close()
    with pytest.raises(Fault) as refused:
        await waiters.wait()
    assert refused.value.code == "closing"
    waiters.notify()
    await asyncio.wait_for(task, 60)
