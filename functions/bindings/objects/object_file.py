"""The storage of one Durable Object: a SQLite file with its keys, its alarm, and its SQL tables.

Writes are collected in one transaction until `commit`, so writes of an object with no other await between them are stored together or not at all.
`begin` and `end` are savepoints inside it. The owner chooses the thread and runs one call at a time.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pilotlight.functions.bindings.objects.object_history import ObjectHistory
from pilotlight.functions.bindings.storage.sql import Outcome, StatementGuard, execute, statements_of
from pilotlight.functions.bindings.storage.wal_archive import HistoryError
from pilotlight.support.database import BUSY_TIMEOUT_S, PAGE_BYTES, STEPS_BETWEEN_CHECKS, Connection, DatabaseError

TIME_LIMIT_S = 10.0  # per statement; the function's process is blocked meanwhile
MAX_DEPTH = 32  # nested transactions
MAX_STATEMENTS = 1000
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS _cf_KV (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS _cf_ALARM (one INTEGER PRIMARY KEY CHECK (one = 1), at_ms INTEGER NOT NULL, "
    "retries INTEGER NOT NULL, is_running INTEGER NOT NULL)",
)


class Alarm(NamedTuple):
    at_ms: int
    retries: int
    is_running: bool


class StorageListing(NamedTuple):
    """Selects keys: from `start` or after `start_after`, before `end`, with a prefix."""

    start: str | None = None
    start_after: str | None = None
    end: str | None = None
    prefix: str = ""
    reverse: bool = False
    limit: int | None = None


class ObjectFile:
    def __init__(
        self,
        path: Path,
        max_bytes: int,
        history_s: float = 0.0,
        now_s: Callable[[], float] = time.time,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        """`history_s` is how long its history is kept; 0 keeps none. `time_limit_s` is for each call of `sql`."""
        self._time_limit_s = time_limit_s
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._depth = 0
        self._history = ObjectHistory(path, history_s, now_s) if history_s else None
        self._deletes_all_at: int | None = None  # depth of the transaction that deletes everything; None if none does
        self._deadline_s = float("inf")
        # No statement cache: a statement compiled while the guard was off must not be reused for a function's equal SQL.
        self._connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=0
        )
        try:
            self._prepare(self._connection, max_bytes)
            self._guard = StatementGuard(self._connection, "transactionSync()")
        except BaseException:
            self._connection.close()
            raise
        self._connection.set_progress_handler(self._is_over, STEPS_BETWEEN_CHECKS)

    @property
    def is_dirty(self) -> bool:
        """Tell whether there are uncommitted changes."""
        return self._connection.in_transaction

    def close(self) -> None:
        if self._history is None:
            self._connection.close()
        else:
            with self._guard.trusting():
                self._history.close(self._connection)

    # -- keys ---------------------------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the values of those keys that exist."""
        marks = ", ".join("?" * len(keys))
        rows = self._trusted(f"SELECT key, value FROM _cf_KV WHERE key IN ({marks})", keys)
        found = {key: msgspec.msgpack.decode(value) for key, value in rows}
        return {key: found[key] for key in keys if key in found}

    def put(self, entries: dict[str, bytes]) -> None:
        self._write()
        for entry in entries.items():
            self._trusted("INSERT INTO _cf_KV VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", entry)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete keys; return how many were there."""
        self._write()
        before = self._connection.total_changes
        for key in keys:
            self._trusted("DELETE FROM _cf_KV WHERE key = ?", (key,))
        return self._connection.total_changes - before

    def listed(self, listing: StorageListing, max_bytes: int) -> list[list[Any]]:
        """List [key, value] in the byte order of the keys.
        Raises DatabaseError if keys and values have more than `max_bytes` together."""
        bounds: list[tuple[str, str | None]] = [
            ("key >= ?", listing.start),
            ("key > ?", listing.start_after),
            ("key < ?", listing.end),
            ("key >= ?", listing.prefix or None),
            ("substr(key, 1, length(?)) = ?", listing.prefix or None),
        ]
        where, values = ["1"], []
        for condition, value in bounds:
            if value is not None:
                where.append(condition)
                values += [value] * condition.count("?")
        order = "DESC" if listing.reverse else "ASC"
        sql = f"SELECT key, value FROM _cf_KV WHERE {' AND '.join(where)} ORDER BY key {order} LIMIT ?"
        size, found = 0, []
        for key, value in self._trusted(sql, (*values, -1 if listing.limit is None else listing.limit)):
            size += len(key) + len(value)
            if size > max_bytes:
                sentence = f"the listed values have more than {max_bytes} bytes; ask for fewer with limit"
                raise DatabaseError(sentence, "too_large")
            found.append([key, msgspec.msgpack.decode(value)])
        return found

    def delete_all(self) -> None:
        """Delete all keys, the alarm, all tables and views, and with the commit the history."""
        self._write()
        with self._guard.trusting():
            self._connection.execute("PRAGMA defer_foreign_keys = ON")
        made = self._trusted(
            "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
            "AND name NOT LIKE '\\_cf\\_%' ESCAPE '\\' ORDER BY sql LIKE 'CREATE VIRTUAL%' DESC",
            (),
        )
        for kind, name in made:
            quoted = '"' + name.replace('"', '""') + '"'
            self._trusted(f"DROP {kind.upper()} IF EXISTS {quoted}", ())
        self._trusted("DELETE FROM _cf_KV", ())
        self.delete_alarm()
        if self._deletes_all_at is None:
            self._deletes_all_at = self._depth

    # -- SQL ----------------------------------------------------------------------------------------------------------------------

    def sql(self, script: str, parameters: Sequence[Any]) -> Outcome:
        """Run one or more statements; parameters and result are those of the last one. Raises SqlError."""
        statements = statements_of(script)
        if not 1 <= len(statements) <= MAX_STATEMENTS:
            raise DatabaseError(f"exec takes 1 to {MAX_STATEMENTS} statements, not {len(statements)}", "bad_sql")
        if len(statements) > 1 or not _only_reads(statements[0]):
            self._write()
        self._deadline_s = time.monotonic() + self._time_limit_s
        try:
            for statement in statements[:-1]:
                execute(self._connection, self._guard, statement)
            return execute(self._connection, self._guard, statements[-1], parameters)
        finally:
            self._deadline_s = float("inf")
            self._guard.reset(self._connection)

    def size_bytes(self) -> int:
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        return int(self._trusted(query, ())[0][0])

    # -- transactions -------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._depth >= MAX_DEPTH:
            raise DatabaseError(f"{MAX_DEPTH} nested transactions are open already", "too_deep")
        self._write()
        self._trusted(f"SAVEPOINT _cf_{self._depth}", ())
        self._depth += 1

    def end(self, *, keep: bool) -> None:
        if self._depth == 0:
            raise DatabaseError("no transaction is open", "no_transaction")
        self._depth -= 1
        if not keep:
            self._trusted(f"ROLLBACK TO _cf_{self._depth}", ())
        self._trusted(f"RELEASE _cf_{self._depth}", ())
        if self._deletes_all_at is not None and self._deletes_all_at > self._depth:
            self._deletes_all_at = self._depth if keep else None

    def commit(self) -> None:
        """Commit the changes; do nothing while an explicit transaction is open."""
        if self._depth or not self._connection.in_transaction:
            return
        try:
            self._trusted("COMMIT", ())
        except BaseException:
            self.rollback()
            raise
        if self._history is not None:
            with self._guard.trusting():
                if self._deletes_all_at is not None:
                    self._history.delete(self._connection)
                else:
                    self._history.committed(self._connection)
        self._deletes_all_at = None

    def rollback(self) -> None:
        self._depth = 0
        self._deletes_all_at = None
        if self._connection.in_transaction:
            self._trusted("ROLLBACK", ())

    # -- the history --------------------------------------------------------------------------------------------------------------

    def current_bookmark(self) -> str:
        """Return the bookmark of the last commit. Raises HistoryError."""
        with self._guard.trusting():
            return self._recorded().current(self._connection)

    def bookmark_at(self, at_s: float) -> str:
        """Return the bookmark of the last commit at or before a time. Raises HistoryError."""
        with self._guard.trusting():
            return self._recorded().at(at_s, self._connection)

    def restore_next(self, bookmark: str) -> str:
        """Order `start` to restore a bookmark; return the bookmark that undoes it.
        Raises HistoryError, OSError."""
        with self._guard.trusting():
            return self._recorded().restore_next(bookmark, self._connection)

    def start(self) -> bool:
        """Roll back uncommitted changes, and restore a bookmark if that was ordered; return whether it was.
        `forget_restoration` must follow, or the next start restores it again. Raises DatabaseError."""
        self.rollback()
        if self._history is None or not self._history.has_restoration:
            return False
        try:
            with self._guard.trusting():
                is_restored = self._history.restore(self._connection)
                _create_tables(self._connection)  # the content before the first commit has none
                return is_restored
        except OSError as error:
            raise DatabaseError(f"the object cannot be restored: {error}", "storage_full") from None

    def forget_restoration(self) -> None:
        if self._history is not None:
            self._history.forget_restoration()

    # -- the alarm ----------------------------------------------------------------------------------------------------------------

    def alarm(self) -> Alarm | None:
        rows = self._trusted("SELECT at_ms, retries, is_running FROM _cf_ALARM", ())
        return Alarm(rows[0][0], rows[0][1], bool(rows[0][2])) if rows else None

    def set_alarm(self, at_ms: int, retries: int = 0, *, is_running: bool = False) -> None:
        self._write()
        self._trusted("INSERT OR REPLACE INTO _cf_ALARM VALUES (1, ?, ?, ?)", (at_ms, retries, is_running))

    def delete_alarm(self) -> None:
        self._write()
        self._trusted("DELETE FROM _cf_ALARM", ())

    def _recorded(self) -> ObjectHistory:
        if self._history is None:
            raise HistoryError("the object has no history: the site keeps none (functions.history_days)")
        return self._history

    def _prepare(self, connection: Connection, max_bytes: int) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if self._history is not None:
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # the history checkpoints
        connection.execute(f"PRAGMA max_page_count = {max(64, max_bytes // PAGE_BYTES)}")
        _create_tables(connection)

    def _write(self) -> None:
        if not self._connection.in_transaction:
            self._trusted("BEGIN IMMEDIATE", ())

    def _trusted(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        with self._guard.trusting():
            return self._connection.execute(sql, tuple(parameters)).fetchall()

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline_s


def _create_tables(connection: Connection) -> None:
    for statement in SCHEMA:
        connection.execute(statement)


def _only_reads(statement: str) -> bool:
    """Guess from the first word whether a statement only reads.
    A wrong guess costs only an empty transaction."""
    return statement.lstrip()[:6].upper() in ("SELECT", "PRAGMA", "EXPLAI", "VALUES")
