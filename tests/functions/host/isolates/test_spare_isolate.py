"""A spare isolate, with stand-ins for its zygote and its process: when one is forked, and who closes it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.host.isolates.spare_isolate import AFTER_S, SpareIsolate
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError


class Isolate:
    def __init__(self) -> None:
        self.is_usable, self.num_closed = False, 0
        self.process = SimpleNamespace(is_running=True)
        self.gone = asyncio.Event()

    async def until_gone(self) -> None:
        await self.gone.wait()

    async def close(self) -> None:
        self.num_closed += 1
        self.gone.set()


class Factory:
    def __init__(self) -> None:
        self.zygote = SimpleNamespace(current=SimpleNamespace(is_alive=True, can_fork=True))
        self.made: list[Isolate] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.fails_with: Exception | None = None

    def new(self, on_fault: Any, *, is_on_probation: bool) -> Isolate:
        assert not is_on_probation
        self.made.append(Isolate())
        return self.made[-1]

    async def start(self, isolate: Isolate, *, is_on_probation: bool) -> None:
        await self.may_start.wait()
        if self.fails_with is not None:
            raise self.fails_with
        isolate.is_usable = True


class Made:
    def __init__(self) -> None:
        self.factory = Factory()
        self.spare = SpareIsolate(cast(Any, self.factory), lambda isolate, fault: None)

    async def run(self) -> "tuple[Isolate, asyncio.Future[None]]":
        running = asyncio.ensure_future(self.spare.run())
        await settle()
        return self.factory.made[-1], running

    def take(self, now: float = 0.0) -> Any:
        return self.spare.take(now)

    def is_wanted(self, now: float = 100.0) -> bool:
        return self.spare.is_wanted(now)


@pytest.fixture
def made() -> Made:
    return Made()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_is_forked_once_the_zygote_has_its_imports_and_only_one(made: Made) -> None:
    zygote, made.factory.zygote.current = made.factory.zygote.current, None
    assert not made.is_wanted()
    made.factory.zygote.current, zygote.can_fork = zygote, False
    assert not made.is_wanted()
    zygote.can_fork = True
    assert made.is_wanted()
    isolate, _ = await made.run()
    assert not made.is_wanted()
    assert made.take() is isolate
    assert not made.is_wanted(AFTER_S), "the request that took it goes first"
    assert made.is_wanted(AFTER_S + 0.1)
    assert isolate.num_closed == 0, "the request closes it"


async def test_one_that_is_starting_or_dead_is_not_taken(made: Made) -> None:
    assert made.take() is None
    made.factory.may_start.clear()
    isolate, _ = await made.run()
    assert made.take() is None
    made.factory.may_start.set()
    await settle()
    isolate.process.is_running = False
    assert made.take() is None
    isolate.process.is_running = True
    assert made.take() is isolate


async def test_a_zygote_whose_spare_isolate_ended_by_itself_gets_no_other(made: Made) -> None:
    isolate, running = await made.run()
    isolate.gone.set()
    await asyncio.wait_for(running, 60)
    assert (isolate.num_closed, made.is_wanted(), made.take()) == (1, False, None)
    made.factory.zygote.current = SimpleNamespace(is_alive=True, can_fork=True)
    assert made.is_wanted()


async def test_one_that_ended_with_its_zygote_does_not_count_against_the_next(made: Made) -> None:
    isolate, running = await made.run()
    made.factory.zygote.current.is_alive = False
    isolate.gone.set()
    await asyncio.wait_for(running, 60)
    made.factory.zygote.current.is_alive = True
    assert (isolate.num_closed, made.is_wanted()) == (1, True)


@pytest.mark.parametrize("error", [ZygoteError("no room"), OSError("no descriptors")])
async def test_one_that_cannot_be_started_is_closed_and_not_tried_again(made: Made, error: Exception) -> None:
    made.factory.fails_with = error
    isolate, running = await made.run()
    await asyncio.wait_for(running, 60)
    assert (isolate.num_closed, made.is_wanted()) == (1, False)


@pytest.mark.parametrize("is_started", [False, True])
async def test_it_ends_with_its_version_even_while_it_starts(made: Made, is_started: bool) -> None:
    if not is_started:
        made.factory.may_start.clear()
    isolate, running = await made.run()
    await made.spare.close()
    made.factory.may_start.set()
    await asyncio.wait_for(running, 60)
    assert (isolate.num_closed >= 1, made.take()) == (True, None)
