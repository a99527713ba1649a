"""The store of usage records: one SQLite file, to which records are only added.

Each record is written once, however often that is tried: its id is unique, and what is there already is left as it is. Used by one thread at a time.
"""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_router.ledger.records import UsageRecord

VERSION = 1  # of the table
_COLUMNS = (
    "id", "request_id", "account", "key", "model", "site", "started_s", "ended_s", "outcome",
    "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost", "version",
)  # fmt: skip
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    id TEXT PRIMARY KEY, request_id TEXT NOT NULL, account TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, site TEXT NOT NULL,
    started_s REAL NOT NULL, ended_s REAL NOT NULL, outcome TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL, cost INTEGER, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_started ON usage (started_s);
CREATE TRIGGER IF NOT EXISTS usage_is_not_changed BEFORE UPDATE ON usage BEGIN SELECT RAISE(ABORT, 'usage is only added to'); END;
CREATE TRIGGER IF NOT EXISTS usage_is_not_deleted BEFORE DELETE ON usage BEGIN SELECT RAISE(ABORT, 'usage is only added to'); END;
"""
GROUPS = {name: name for name in ("account", "key", "model", "site", "outcome")} | {
    "day": "date(started_s, 'unixepoch')"
}


class UsageQuery(NamedTuple):
    from_s: float = 0.0  # since the epoch, by when requests began
    to_s: float = 1e12
    by: tuple[str, ...] = ("account", "model")  # of GROUPS
    account: str | None = None  # this one's alone


class UsageStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def add(self, records: Sequence[UsageRecord]) -> None:
        """Keep records, all or none, on the disk when this returns. Raises sqlite3.Error, OSError; the same ones may then be added again."""
        try:
            connection = self._open()
            with connection:
                marks = ", ".join("?" * len(_COLUMNS))
                connection.executemany(
                    f"INSERT INTO usage ({', '.join(_COLUMNS)}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING",
                    map(_row, records),
                )
        except (sqlite3.Error, OSError):
            self.close()  # the next attempt begins anew, whatever was wrong with this connection
            raise

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        """Return sums of records by the query's groups. Raises sqlite3.Error, OSError."""
        groups = [f"{GROUPS[name]} AS {name}" for name in query.by]
        sums = [f"COALESCE(SUM({name}), 0) AS {name}" for name in _COLUMNS if name.endswith("_tokens")]
        chosen = ", ".join([*groups, "COUNT(*) AS requests", *sums, "SUM(cost) AS cost"])
        where = "started_s >= ? AND started_s < ?"
        values: list[float | str] = [query.from_s, query.to_s]
        if query.account is not None:
            where += " AND account = ?"
            values.append(query.account)
        order = ", ".join(str(i + 1) for i in range(len(query.by)))
        behind = f" GROUP BY {order} ORDER BY {order}" if query.by else ""
        found = self._open().execute(f"SELECT {chosen} FROM usage WHERE {where}{behind}", values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        """Open the file, and again where it is no longer the one that was opened: what is written to a deleted file is lost."""
        if self._connection is not None and self._inode != _inode(self._path):
            self.close()
        if self._connection is None:
            connection = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(_SCHEMA)
            except BaseException:
                connection.close()
                raise
            self._connection, self._inode = connection, _inode(self._path)
        return self._connection


def _row(record: UsageRecord) -> tuple[Any, ...]:
    request, tokens = record.request, record.tokens
    return (
        request.id, request.request_id, request.account, request.key, request.model, record.site, request.started_s, record.ended_s,
        record.outcome, *tokens, record.cost, VERSION,
    )  # fmt: skip


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
