"""Zygotes of idle functions that are kept in memory, and those that are created in advance."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.host.zygotes.zygote_budget import (
    SPARE_MIB,
    SPARES_AT_ONCE,
    TRIM_S,
    PoolProcesses,
    ZygoteBudget,
    ZygoteTimings,
)
from pilotlight.functions.sandbox.zygotes.zygote_client import COPIED_MIB
from tests.clock import Clock


class Zygote:
    def __init__(self, asleep_since: float | None, asleep_mib: int | None) -> None:
        self.asleep_since, self.asleep_mib = asleep_since, asleep_mib
        self.is_closed = self.has_imports = False

    async def read_imports(self) -> None:
        self.has_imports = True

    def close(self) -> None:
        self.is_closed = True


class Isolates:
    has_spare = False

    def wants_spare(self, now: float) -> bool:
        return not self.has_spare

    def fork_spare(self) -> None:
        self.has_spare = True

    def end_spare(self) -> None:
        self.has_spare = False


class Pool:
    """A function whose zygote has been idle since the given time."""

    def __init__(self, asleep_since: float | None = None, asleep_mib: int | None = 10) -> None:
        self.zygote = Zygote(asleep_since, asleep_mib)
        self.factory = SimpleNamespace(zygote=self.zygote)
        self.isolates = Isolates()
        self.num_prepared = 0

    async def prepare(self) -> None:
        self.num_prepared += 1


def pools(*made: Pool) -> list[PoolProcesses]:
    return cast(Any, [*made])


@pytest.mark.parametrize(("mib", "ended"), [(40, 0), (30, 0), (29, 1), (20, 1), (19, 2), (1, 3), (0, 3)])
def test_the_longest_asleep_go_until_those_left_fit(mib: int, ended: int) -> None:
    asleep = [Pool(3.0), Pool(1.0), Pool(2.0)]
    awake = Pool(None, 1000)
    ZygoteBudget(mib).end_longest_asleep(pools(asleep[0], awake, *asleep[1:]))
    in_order = sorted(asleep, key=lambda pool: pool.zygote.asleep_since or 0.0)
    assert [pool.zygote.is_closed for pool in in_order] == [i < ended for i in range(3)]
    assert not awake.zygote.is_closed


@pytest.mark.parametrize(("more", "is_ended"), [(0, False), (-1, True)])
def test_one_that_was_not_measured_yet_counts_as_what_a_new_one_copies(more: int, is_ended: bool) -> None:
    first, second = Pool(1.0, None), Pool(2.0, 5)
    ZygoteBudget(COPIED_MIB + 5 + more).end_longest_asleep(pools(first, second))
    assert (first.zygote.is_closed, second.zygote.is_closed) == (is_ended, False)


def test_it_looks_now_and_then() -> None:
    clock = Clock(1000.0)
    budget = ZygoteBudget(0, clock=clock)
    looked = []
    for at in (100.0, 100.0 + TRIM_S, 100.1 + TRIM_S, 100.1 + 2 * TRIM_S, 101.0 + 2 * TRIM_S):
        clock.now = at
        pool = Pool(1.0)
        budget.trim(pools(pool))
        looked.append(pool.zygote.is_closed)
    assert looked == [True, False, True, False, True]


async def test_functions_have_their_zygotes_before_they_are_asked_as_far_as_there_is_room() -> None:
    budget = ZygoteBudget(2 * COPIED_MIB, ZygoteTimings(0.0, 0.0))
    added = [Pool() for _ in range(4)]
    for pool in added:
        budget.add(cast(Any, pool))
    preparing = asyncio.ensure_future(budget.prepare(lambda pool: cast(Any, pool) is not added[0]))
    for _ in range(30):
        await asyncio.sleep(0)
    assert [pool.num_prepared for pool in added] == [0, 1, 1, 0], (
        "the first pool is no longer served, and there is room for two"
    )
    assert [pool.zygote.has_imports for pool in added] == [False, False, False, True], (
        "its zygote can be created sooner"
    )
    budget.end_longest_asleep([])
    budget.add(cast(Any, added[3]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert added[3].num_prepared == 1
    preparing.cancel()
    await asyncio.gather(preparing, return_exceptions=True)


async def test_spare_isolates_are_forked_a_few_at_a_time_while_there_is_room() -> None:
    budget, waiting = ZygoteBudget(100), [Pool(1.0) for _ in range(SPARES_AT_ONCE + 1)]
    assert [budget.fork_spares(pools(*waiting)) for _ in range(3)] == [True, True, False]
    assert all(pool.isolates.has_spare for pool in waiting)
    small, waiting = ZygoteBudget(2 * SPARE_MIB - 1), [Pool() for _ in range(2)]
    assert [small.fork_spares(pools(*waiting)) for _ in range(2)] == [True, False], "there is room for one"


def test_spare_isolates_go_before_zygotes_and_do_not_return_while_there_is_no_room() -> None:
    asleep, awake = [Pool(2.0), Pool(1.0)], Pool()
    for pool in (*asleep, awake):
        pool.isolates.fork_spare()

    def left(mib: int) -> list[tuple[bool, bool]]:
        ZygoteBudget(mib).end_longest_asleep(pools(*asleep, awake))
        return [(not pool.zygote.is_closed, pool.isolates.has_spare) for pool in asleep]

    assert left(20 + 3 * SPARE_MIB) == [(True, True), (True, True)]
    assert left(20 + 2 * SPARE_MIB) == [(True, True), (True, False)]
    assert left(20 + SPARE_MIB) == [(True, False), (True, False)]
    assert left(10 + SPARE_MIB) == [(True, False), (False, False)]
    assert awake.isolates.has_spare


async def test_a_spare_isolate_that_was_ended_for_its_memory_is_not_forked_again_at_once() -> None:
    budget, pool = ZygoteBudget(10 + SPARE_MIB - 1), Pool(1.0)
    pool.isolates.fork_spare()
    for _ in range(2):
        budget.end_longest_asleep(pools(pool))
        assert not pool.isolates.has_spare
        assert not budget.fork_spares(pools(pool))
