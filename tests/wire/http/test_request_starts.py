"""Requests are started in the order of their arrival, a few in each turn of the loop."""

import asyncio
from functools import partial

from pilotlight.wire.http.request_starts import RequestStarts


async def test_of_a_burst_a_few_start_in_each_turn_in_the_order_of_their_arrival() -> None:
    loop, starts, seen = asyncio.get_running_loop(), RequestStarts(3), list[int]()
    for number in range(8):
        starts.add(loop, partial(seen.append, number))
    turns = [list(seen)]
    while len(seen) < 8:
        await asyncio.sleep(0)
        turns.append(list(seen))
    assert turns == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [*range(8)]]


async def test_one_that_comes_while_others_wait_starts_after_them() -> None:
    loop, starts, seen = asyncio.get_running_loop(), RequestStarts(1), list[str]()
    starts.add(loop, partial(seen.append, "a"))
    starts.add(loop, partial(seen.append, "b"))
    await asyncio.sleep(0)
    starts.add(loop, partial(seen.append, "c"))
    assert seen == ["a", "b"]
    await asyncio.sleep(0)
    assert seen == ["a", "b", "c"]


async def test_requests_that_come_one_by_one_start_at_once() -> None:
    loop, starts, seen = asyncio.get_running_loop(), RequestStarts(1), list[int]()
    for number in range(3):
        starts.add(loop, partial(seen.append, number))
        assert seen[-1] == number
        await asyncio.sleep(0)
