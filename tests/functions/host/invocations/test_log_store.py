"""The file of invocations: queries, expiry by age, and deletion of records when one function fills it."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from pilotlight.functions.host.invocations.log_store import InvocationRow, LineRow, LogStore
from pilotlight.wire.hop.function_logs import LogQuery

NOW_S = 1_000_000_000.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LogStore]:
    made = LogStore(tmp_path / "logs.sqlite", days=1.0, mib=1, clock=lambda: NOW_S)
    yield made
    await made.close()


def row(id: int, function: str = "f", at_s: float = NOW_S) -> InvocationRow:
    return InvocationRow(id, function, "", at_s, 1.0, 0.5, "fetch", f"GET /{id}", 200, "ok")


async def ids(store: LogStore, function: str = "f", **query: int | float) -> list[int]:
    return [int(each.id) for each in await store.find(LogQuery(function, **query))]


async def test_of_many_the_newest_are_found_and_after_one_the_oldest(store: LogStore) -> None:
    await store.write([row(id, at_s=NOW_S + id) for id in range(1, 11)], [])
    assert await ids(store, limit=3) == [10, 9, 8]
    assert await ids(store, after=4, limit=3) == [5, 6, 7]
    assert await ids(store, since_s=NOW_S + 9) == [10, 9]


async def test_what_is_too_old_is_forgotten_with_its_lines(store: LogStore, tmp_path: Path) -> None:
    unrecorded = LineRow(3, NOW_S - 90_000, "log", "of a process that was killed")
    lines = [unrecorded, LineRow(1, NOW_S, "log", "old"), LineRow(2, NOW_S, "log", "new")]
    await store.write([row(1, at_s=NOW_S - 90_000), row(2)], lines)
    await store.trim()
    (left,) = await store.find(LogQuery("f"))
    assert (left.id, [line.text for line in left.lines]) == ("2", ["new"])
    with closing(sqlite3.connect(tmp_path / "logs.sqlite")) as file:
        assert file.execute("SELECT COUNT(*) FROM lines").fetchone() == (1,)


async def test_a_function_that_prints_a_lot_loses_only_its_own_oldest_lines(store: LogStore) -> None:
    await store.write([row(id, "quiet") for id in range(1, 101)], [])
    for first in range(1000, 1400, 100):
        loud = range(first, first + 100)
        await store.write([row(id, "loud") for id in loud], [LineRow(id, NOW_S, "log", "x" * 4000) for id in loud])
    await store.trim()
    assert len(await ids(store, "quiet", limit=1000)) == 100
    left = await ids(store, "loud", limit=1000)
    assert 0 < len(left) < 300
    assert left == sorted(range(1400 - len(left), 1400), reverse=True), "the newest records are left"
