"""The log of a site's functions: invocations with their output in one SQLite file.

It is limited by age and size. Writes happen in batches, after the requests. Above the limit of size, the function with the most data loses its oldest
records, so a function that prints a lot loses only its own history.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pilotlight.support.database import Connection, Database, create, transaction
from pilotlight.wire.hop.function_logs import LoggedInvocation, LogLine, LogQuery

SCHEMA = """
CREATE TABLE IF NOT EXISTS invocations (seq INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER NOT NULL, function TEXT NOT NULL, version TEXT NOT NULL,
  at_s REAL NOT NULL, wall_ms REAL NOT NULL, cpu_ms REAL NOT NULL, trigger TEXT NOT NULL, what TEXT NOT NULL, status INTEGER, outcome TEXT NOT NULL,
  error TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS invocations_by_function ON invocations (function, seq);
CREATE TABLE IF NOT EXISTS lines (invocation INTEGER NOT NULL, at_s REAL NOT NULL, level TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS lines_by_invocation ON lines (invocation)
"""
LOGS = "function-logs.sqlite"  # in the site's state directory
COLUMNS = "id, function, version, at_s, wall_ms, cpu_ms, trigger, what, status, outcome, error, detail"
MAX_LINES = 1000  # lines returned of one invocation
TRIM_ROWS = 2000  # rows deleted at once, so that queries do not wait for long
FIND_S = 10.0


class InvocationRow(NamedTuple):
    id: int
    function: str
    version: str
    at_s: float
    wall_ms: float
    cpu_ms: float
    trigger: str
    what: str
    status: int | None
    outcome: str
    error: str = ""
    detail: str = ""


class LineRow(NamedTuple):
    invocation: int
    at_s: float
    level: str
    text: str


class LogStore:
    def __init__(self, path: Path, *, days: float, mib: int, clock: Callable[[], float] = time.time) -> None:
        """Records are deleted after `days`, and when they take more than `mib` MiB."""
        self._days = days
        self._max_bytes = mib << 20
        self._clock = clock
        # The file may take twice the limit, because it grows between two trims. New rows reuse the pages of deleted ones.
        self._database = Database(path, lambda connection: create(connection, SCHEMA), max_bytes=2 * self._max_bytes)

    async def write(self, invocations: Iterable[InvocationRow], lines: Iterable[LineRow]) -> None:
        """Store invocations and lines of output. Raises sqlite3.Error and DatabaseError."""

        def work(connection: Connection) -> None:
            with transaction(connection):
                marks = ", ".join("?" * len(InvocationRow._fields))
                connection.executemany(f"INSERT INTO invocations ({COLUMNS}) VALUES ({marks})", invocations)
                connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", lines)

        await self._database.run(work)

    async def find(self, query: LogQuery) -> list[LoggedInvocation]:
        """Return the invocations that match. Raises sqlite3.Error and DatabaseError."""
        return await self._database.run(lambda connection: _found(connection, query), FIND_S)

    async def trim(self) -> None:
        """Delete records above the limits of age and size. Raises sqlite3.Error and DatabaseError."""
        before_s = self._clock() - self._days * 86_400
        oldest = (
            f"SELECT seq, id FROM (SELECT seq, id, at_s FROM invocations ORDER BY seq LIMIT {TRIM_ROWS}) WHERE at_s < ?"
        )
        while await self._database.run(lambda connection: _delete(connection, oldest, before_s)):
            pass
        while await self._database.run(lambda connection: _delete_lines(connection, before_s)):
            pass
        while await self._database.run(self._is_too_large):
            largest = await self._database.run(_largest)
            if largest is None:
                return
            share = f"MIN({TRIM_ROWS}, (SELECT MAX(1, COUNT(*) / 8) FROM invocations WHERE function = ?1))"
            too_much = f"SELECT seq, id FROM invocations WHERE function = ?1 ORDER BY seq LIMIT {share}"
            if not await self._database.run(partial(_delete, sql=too_much, value=largest)):
                return

    async def close(self) -> None:
        await self._database.close()

    def _is_too_large(self, connection: Connection) -> bool:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return bool((pages - free) * size > self._max_bytes)


def _found(connection: Connection, query: LogQuery) -> list[LoggedInvocation]:
    conditions, values = ["function = ?", "at_s >= ?", "seq > ?"], [query.function, query.since_s, query.after]
    if query.status == "error":
        conditions.append("(outcome NOT IN ('ok', 'canceled') OR status >= 500)")
    elif query.status is not None and query.status.endswith("xx"):
        conditions.append("status / 100 = ?")
        values.append(int(query.status[0]))
    elif query.status is not None:
        conditions.append("status = ?" if query.status.isdigit() else "outcome = ?")
        values.append(int(query.status) if query.status.isdigit() else query.status)
    if query.grep:
        conditions.append(
            "(instr(what, ?) OR instr(error, ?) OR instr(detail, ?) OR EXISTS "
            "(SELECT 1 FROM lines WHERE invocation = invocations.id AND instr(text, ?)))"
        )
        values += [query.grep] * 4
    order = "ASC" if query.after else "DESC"
    sql = f"SELECT seq, {COLUMNS} FROM invocations WHERE {' AND '.join(conditions)} ORDER BY seq {order} LIMIT ?"
    found = []
    for seq, id, *rest in connection.execute(sql, [*values, query.limit]).fetchall():
        lines = connection.execute(
            "SELECT at_s, level, text FROM lines WHERE invocation = ? ORDER BY rowid LIMIT ?", (id, MAX_LINES)
        )
        printed = tuple(LogLine(*line) for line in lines)
        found.append(replace(LoggedInvocation(seq, str(id), *rest), lines=printed))
    return found


def _largest(connection: Connection) -> str | None:
    """Return the function whose records take the most space."""
    sql = (
        "SELECT function, SUM(200 + LENGTH(detail) + (SELECT COALESCE(SUM(80 + LENGTH(text)), 0) FROM lines WHERE invocation = id)) AS size "
        "FROM invocations GROUP BY function ORDER BY size DESC LIMIT 1"
    )
    row = connection.execute(sql).fetchone()
    return None if row is None else str(row[0])


def _delete_lines(connection: Connection, before_s: float) -> int:
    """Delete some of the oldest lines; return their number.
    A process that is killed leaves lines of invocations that are never recorded."""
    oldest = "SELECT rowid, at_s FROM lines ORDER BY rowid LIMIT ?"
    sql = f"DELETE FROM lines WHERE rowid IN (SELECT rowid FROM ({oldest}) WHERE at_s < ?)"
    return connection.execute(sql, (TRIM_ROWS, before_s)).rowcount


def _delete(connection: Connection, sql: str, value: object) -> int:
    """Delete the records selected by a query for `seq` and `id`; return their number."""
    found = connection.execute(sql, (value,)).fetchall()
    with transaction(connection):
        connection.executemany("DELETE FROM lines WHERE invocation = ?", [(id,) for _, id in found])
        connection.executemany("DELETE FROM invocations WHERE seq = ?", [(seq,) for seq, _ in found])
    return len(found)
