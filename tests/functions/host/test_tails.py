"""Followers of a function's output: each gets lines from its arrival on; a slow one learns that it missed lines."""

import asyncio
from collections.abc import AsyncGenerator

from pilotlight.functions.host.tails import MAX_FOLLOWERS, MAX_WAITING, Line, Tails


async def started(tails: Tails, function: str = "f") -> tuple[AsyncGenerator[Line, None], "asyncio.Task[Line]"]:
    """Start a follower; return it and the task that waits for its first line."""
    following = tails.follow(function)
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    return following, waiting


async def test_each_follower_gets_every_line_of_its_function_from_now_on() -> None:
    tails = Tails()
    tails.publish("f", "nobody heard it")
    first, waits = await started(tails)
    other, others = await started(tails, "g")
    tails.publish("f", "one")
    second, second_waits = await started(tails)
    tails.publish("f", "two")
    assert ((await waits).text, (await anext(first)).text, (await second_waits).text) == ("one", "two", "two")
    assert not others.done()
    await first.aclose()
    tails.publish("f", "three")
    assert (await anext(second)).text == "three"
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)
    await second.aclose()
    await other.aclose()


async def test_a_slow_follower_misses_lines_and_learns_how_many() -> None:
    tails = Tails()
    following, waiting = await started(tails)
    tails.publish("f", "begin")
    await waiting
    for i in range(MAX_WAITING + 1):
        tails.publish("f", str(i))
    assert [(await anext(following)).text for _ in range(2)] == [
        f"({MAX_WAITING} lines were dropped, because they were not read in time)", str(MAX_WAITING),
    ]  # fmt: skip
    for i in range(MAX_WAITING):
        tails.publish("f", str(i))
    assert (await anext(following)).text == "0", "MAX_WAITING lines are queued"
    await following.aclose()


async def test_a_function_has_a_limit_of_followers_and_a_leaving_one_makes_room() -> None:
    tails = Tails()
    assert not tails.is_full("f")
    followers = [await started(tails) for _ in range(MAX_FOLLOWERS - 1)]
    assert not tails.is_full("f")
    followers.append(await started(tails))
    assert (tails.is_full("f"), tails.is_full("g")) == (True, False)
    for following, waiting in followers:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await following.aclose()
        assert not tails.is_full("f")
