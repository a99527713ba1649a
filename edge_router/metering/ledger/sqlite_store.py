"""Usage records of one router in a SQLite file."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pilotlight.edge_router.metering.ledger.ledger_store import (
    ONLY_ADDED,
    UsageQuery,
    UsageStoreError,
    insertion,
    row,
    selection,
)
from pilotlight.support.database import DatabaseError, claim_version
from pilotlight.wire.hop.usage_records import UsageRecord

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
    id TEXT PRIMARY KEY, request_id TEXT NOT NULL, account TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, site TEXT NOT NULL,
    started_s REAL NOT NULL, ended_s REAL NOT NULL, outcome TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL, cost INTEGER, version INTEGER NOT NULL,
    adapter TEXT NOT NULL, drafted_tokens INTEGER NOT NULL, accepted_tokens INTEGER NOT NULL, device_us INTEGER NOT NULL, bytes_in INTEGER NOT NULL,
    bytes_out INTEGER NOT NULL, function TEXT NOT NULL, cpu_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage_identity (id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS usage_started ON usage (started_s);
CREATE TRIGGER IF NOT EXISTS usage_is_not_changed BEFORE UPDATE ON usage BEGIN SELECT RAISE(ABORT, '{ONLY_ADDED}'); END;
CREATE TRIGGER IF NOT EXISTS usage_is_not_deleted BEFORE DELETE ON usage BEGIN SELECT RAISE(ABORT, '{ONLY_ADDED}'); END;
"""
_ADD = insertion("?")


class SqliteStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def add(self, records: Sequence[UsageRecord]) -> None:
        with self._working() as connection, connection:
            connection.executemany(_ADD, map(row, records))

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        with self._working() as connection:
            found = connection.execute(*selection(query, "date(started_s, 'unixepoch')", "?"))
            names = [column[0] for column in found.description]
            return [dict(zip(names, values, strict=True)) for values in found]

    def identity(self) -> str:
        with self._working() as connection, connection:
            connection.execute(
                "INSERT INTO usage_identity SELECT lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT * FROM usage_identity)"
            )
            return str(connection.execute("SELECT id FROM usage_identity").fetchone()[0])

    def interrupt(self) -> None:
        if (connection := self._connection) is not None:
            connection.interrupt()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _working(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection.
        Raises UsageStoreError; after an error the next call opens a new connection."""
        try:
            yield self._open()
        except (sqlite3.Error, OSError, DatabaseError) as error:
            self.close()
            raise UsageStoreError(str(error)) from None

    def _open(self) -> sqlite3.Connection:
        """Open the file; open it again if it was replaced, because writes to a deleted file would be lost."""
        if self._connection is not None and self._inode != _inode(self._path):
            self.close()
        if self._connection is None:
            connection = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                claim_version(connection)
                connection.executescript(_SCHEMA)
            except BaseException:
                connection.close()
                raise
            self._connection, self._inode = connection, _inode(self._path)
        return self._connection


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
