"""The SQLite database: operations run one after another, with a time limit, and are rolled back if they are abandoned. Each refusal names its
cause."""

import asyncio
import errno
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from pilotlight.support.database import (
    PAGE_BYTES,
    Connection,
    Database,
    DatabaseError,
    Databases,
    claim_version,
    create,
    storage_word,
    transaction,
)

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def insert(connection: Connection, number: int = 1) -> None:
    connection.execute("INSERT INTO t VALUES (?)", (number,))


def numbers(connection: Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n")]


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    made = Database(tmp_path / "deep" / "d.sqlite", lambda connection: create(connection, "CREATE TABLE t (n INTEGER)"))
    yield made
    await made.close()
    await made.close()


async def test_work_is_done_in_order_in_a_thread_of_its_own_and_kept(database: Database, tmp_path: Path) -> None:
    threads: set[int] = set()

    def work(connection: Connection, number: int) -> int:
        threads.add(threading.get_ident())
        insert(connection, number)
        return number

    done = await asyncio.gather(*(database.run(partial(work, number=i)) for i in range(20)))
    assert done == [*range(20)]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert await database.run(numbers) == done
    await database.close()
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700
    again = Database(tmp_path / "deep" / "d.sqlite")
    assert await again.run(numbers) == done
    await again.close()


async def test_what_a_piece_of_work_leaves_open_or_breaks_off_is_undone(database: Database) -> None:
    def leaves_open(connection: Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        insert(connection)

    def breaks_off(connection: Connection) -> None:
        with transaction(connection):
            insert(connection)
            raise KeyError("half way")

    def whole(connection: Connection) -> None:
        with transaction(connection):
            insert(connection, 7)

    await database.run(leaves_open)
    with pytest.raises(KeyError):
        await database.run(breaks_off)
    await database.run(whole)
    assert await database.run(numbers) == [7]


async def test_a_statement_that_takes_too_long_is_stopped_by_name_and_the_next_one_is_not(database: Database) -> None:
    with pytest.raises(DatabaseError, match=r"longer than 0\.05 s") as refused:
        await database.run(lambda connection: connection.execute(ENDLESS).fetchall(), time_limit_s=0.05)
    assert refused.value.code == "timeout"
    assert await database.run(numbers) == []
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await database.run(lambda connection: connection.execute("SELECT * FROM other"))


async def test_work_without_waiting_callers_is_stopped_or_never_started(database: Database) -> None:
    started = threading.Event()
    done: list[str] = []

    def endless(connection: Connection) -> None:
        started.set()
        try:
            connection.execute(ENDLESS).fetchall()
        finally:
            done.append("stopped")

    first = asyncio.ensure_future(database.run(endless))
    second = asyncio.ensure_future(database.run(lambda connection: done.append("second")))
    await asyncio.to_thread(started.wait, 20)
    for task in (second, first):
        task.cancel()
    await asyncio.wait({first, second})
    assert await asyncio.wait_for(database.run(numbers), 60) == []
    assert done == ["stopped"]


async def test_so_many_may_wait_and_one_more_is_refused(tmp_path: Path) -> None:
    prepare = partial(create, schema="CREATE TABLE t (n INTEGER)")
    database = Database(tmp_path / "d.sqlite", prepare, max_waiting=3)
    go = threading.Event()
    waiting = [asyncio.ensure_future(database.run(lambda connection: go.wait(60))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(DatabaseError, match="3 requests wait") as refused:
        await database.run(numbers)
    assert refused.value.code == "overloaded"
    go.set()
    await asyncio.gather(*waiting)
    assert await database.run(numbers) == []
    await database.close()


async def test_a_database_is_as_large_as_it_may_be_and_then_says_so(tmp_path: Path) -> None:
    database = Database(
        tmp_path / "d.sqlite",
        lambda connection: create(connection, "CREATE TABLE t (b BLOB)"),
        max_bytes=100 * PAGE_BYTES,
    )

    def fill(connection: Connection) -> None:
        for _ in range(101):
            connection.execute("INSERT INTO t VALUES (?)", (bytes(PAGE_BYTES),))

    with pytest.raises(sqlite3.OperationalError) as refused:
        await database.run(fill)
    word = storage_word(refused.value)
    assert word is not None
    assert word[:2] == ("storage_full", 507)
    pages = await database.run(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
    assert 90 <= pages <= 100
    await database.close()


async def test_a_file_that_cannot_be_set_up_is_tried_again_by_the_next_work(tmp_path: Path) -> None:
    refuses = [True]

    def prepare(connection: Connection) -> None:
        if refuses.pop():
            refuses.append(False)
            raise OSError("not yet")
        refuses.append(False)

    database = Database(tmp_path / "d.sqlite", prepare)
    with pytest.raises(OSError, match="not yet"):
        await database.run(lambda connection: 1)
    assert await database.run(lambda connection: 1) == 1
    await database.close()


async def test_all_that_open_the_same_file_share_it_and_the_later_are_closed_first(tmp_path: Path) -> None:
    closed: list[str] = []

    class Opened:
        def __init__(self, path: Path) -> None:
            self.path = path

        async def close(self) -> None:
            closed.append(self.path.name)

    databases = Databases()
    first = databases.get(tmp_path / "x" / ".." / "a", Opened)
    assert databases.get(tmp_path / "a", Opened) is first
    assert databases.get(tmp_path / "sub" / "b", Opened) is not first
    await databases.close()
    await databases.close()
    assert closed == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("SQLITE_FULL", ("storage_full", 507)),
        ("SQLITE_IOERR_WRITE", ("storage_full", 507)),
        ("SQLITE_BUSY_SNAPSHOT", ("busy", 503)),
        ("SQLITE_CORRUPT", ("corrupt", 500)),
        ("SQLITE_NOTADB", ("corrupt", 500)),
        ("SQLITE_ERROR", None),
        (None, None),
    ],
)
def test_a_storages_failure_has_a_word_and_a_statements_has_none(
    name: str | None, told: tuple[str, int] | None
) -> None:
    error = sqlite3.OperationalError("m")
    if name is not None:
        error.sqlite_errorname = name
    word = storage_word(error)
    assert (None if word is None else word[:2]) == told


@pytest.mark.parametrize(
    ("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False)]
)
def test_a_file_beside_a_database_that_cannot_be_written_is_a_full_storage(code: int, is_full: bool) -> None:
    word = storage_word(OSError(code, os.strerror(code)))
    assert (word is not None and word[:2] == ("storage_full", 507)) is is_full


@pytest.mark.parametrize(("code", "status"), [("overloaded", 429), ("timeout", 408), ("cancelled", 500)])
def test_work_that_was_not_done_has_its_own_word(code: str, status: int) -> None:
    assert storage_word(DatabaseError("why", code)) == (code, status, "why")


async def test_a_limit_is_counted_from_the_works_own_beginning(database: Database) -> None:
    slow = asyncio.ensure_future(database.run(lambda connection: time.sleep(0.15)))
    quick = asyncio.ensure_future(database.run(numbers, time_limit_s=0.1))
    assert (await slow, await quick) == (None, [])


async def test_an_invalid_text_is_reported_as_by_sqlite(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="decode"):
        await database.run(lambda connection: connection.execute("SELECT CAST(x'ff' AS TEXT)").fetchone())


def test_tables_of_a_later_version_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "d.sqlite", isolation_level=None)) as connection:
        create(connection, "CREATE TABLE t (n INTEGER)")
        connection.execute("PRAGMA user_version = 2")
        for open_it in (lambda: create(connection, "CREATE TABLE s (n INTEGER)"), lambda: claim_version(connection)):
            with pytest.raises(DatabaseError, match="have version 2, and this Pilotlight knows 1: a later version"):
                open_it()
        assert [row[0] for row in connection.execute("SELECT name FROM sqlite_master")] == ["t"]
