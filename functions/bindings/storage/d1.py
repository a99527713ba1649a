"""D1: a SQLite database that functions query with SQL.

A batch is one transaction; a statement may take 30 s. functions/bindings/storage/sql.py decides which SQL is allowed. Results are sent as columns and
rows; the SDK turns them into objects.
"""

import asyncio
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pilotlight.functions.bindings.binding import Binding, BindingError, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.bindings.storage.sql import (
    Outcome,
    SqlError,
    StatementGuard,
    as_sql_errors,
    execute,
    statements_of,
)
from pilotlight.functions.bindings.storage.wal_archive import Bookmark, WalArchive, WalHistory
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import Connection, Database, DatabaseError, storage_word

TIME_LIMIT_S = 30.0
VERBS = frozenset({"ALTER", "CREATE", "DELETE", "DROP", "INSERT", "PRAGMA", "REPLACE", "SELECT", "UPDATE", "WITH"})
MAX_STATEMENTS = 1000  # per batch or script

T = TypeVar("T")
Scalar = None | bool | int | float | str | bytes


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sql: str
    parameters: list[Any] = []


class D1Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    statement: Statement


class D1Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    statements: list[Statement]


class D1Exec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    script: str


class D1Database(Binding):
    kind = "d1"

    def __init__(self, database: "GuardedDatabase", time_limit_s: float = TIME_LIMIT_S) -> None:
        self._database = database
        self._time_limit_s = time_limit_s

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "D1Database":
        options = declaration.options
        id = options.get("database_id") or options.get("database_name") or declaration.name
        path = directory_of(state_dir, "d1", id) / "database.sqlite"
        return cls(
            services.databases.get(path, lambda path: GuardedDatabase(path, services.max_bytes, services.history_s))
        )

    @property
    def history(self) -> WalHistory:
        """The moments to which the database can be restored."""
        return self._database.history

    async def restore(self, bookmark: Bookmark) -> Bookmark:
        """Restore the content at a bookmark in one commit; return the bookmark of the replaced content.
        For operators. Raises HistoryError, BindingError."""
        with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:
            built = Path(folder) / "database.sqlite"
            await asyncio.to_thread(self.history.build, bookmark, built)

            def work(connection: Connection, guard: StatementGuard) -> Bookmark:
                before = self.history.now()
                with guard.trusting(), closing(sqlite3.connect(built)) as source:
                    source.backup(connection)
                return before

            return await self._run(work, float("inf"))

    @method
    async def query(self, request: D1Query) -> Any:
        statement = request.statement
        parameters = _checked(statement.parameters)
        return await self._run(lambda c, guard: _as_value(execute(c, guard, statement.sql, parameters)))

    @method
    async def batch(self, request: D1Batch) -> Any:
        """Run the statements in one transaction."""
        if not 1 <= len(request.statements) <= MAX_STATEMENTS:
            raise _error(f"a batch has 1 to {MAX_STATEMENTS} statements, not {len(request.statements)}")
        return await self.transaction(request.statements, self._time_limit_s)

    async def transaction(
        self, given: Iterable[Statement], time_limit_s: float = float("inf"), files: Sequence[str] = ()
    ) -> list[Any]:
        """Run any number of statements in one transaction; for files of the operator, not for functions.
        `files` has the file name of each statement, for error messages. Raises BindingError."""
        statements = [(statement.sql, _checked(statement.parameters)) for statement in given]

        def work(connection: Connection, guard: StatementGuard) -> list[Any]:
            with guard.trusting():
                connection.execute("BEGIN IMMEDIATE")
            values = []
            for number, (sql, parameters) in enumerate(statements):
                try:
                    values.append(_as_value(execute(connection, guard, sql, parameters)))
                except SqlError as error:
                    if not files:
                        raise
                    sentence = str(error).removesuffix(f": {error.code_name}")
                    raise SqlError(f"{files[number]}: {sentence}", error.code_name) from None
            with guard.trusting(), as_sql_errors(guard):
                connection.execute("COMMIT")  # a violated deferred foreign key fails here
            return values

        return await self._run(work, time_limit_s)

    @method
    async def exec(self, request: D1Exec) -> Any:
        statements = statements_of(request.script)
        if not 1 <= len(statements) <= MAX_STATEMENTS:
            raise _error(f"a script has 1 to {MAX_STATEMENTS} statements, not {len(statements)}", "D1_EXEC_ERROR")

        def work(connection: Connection, guard: StatementGuard) -> Any:
            duration_ms, left, count = 0.0, deque(statements), 0
            while left:
                sql = left.popleft()
                try:
                    duration_ms += execute(connection, guard, sql).duration_ms
                    count += 1
                except SqlError as error:
                    if "syntax error" in str(error) and (lines := _one_on_each_line(sql)):
                        left.extendleft(reversed(lines))
                        continue
                    raise _error(f"Error in statement {count + 1}: {sql[:200]}: {error}", "D1_EXEC_ERROR") from None
            return {"count": count, "duration": duration_ms}

        return await self._run(work)

    async def _run(self, work: Callable[[Connection, StatementGuard], T], time_limit_s: float | None = None) -> T:
        try:
            return await self._database.run(work, self._time_limit_s if time_limit_s is None else time_limit_s)
        except SqlError as error:
            raise _error(str(error)) from None
        except DatabaseError as error:
            words = {
                "overloaded": "D1 DB is overloaded. Too many requests queued.",
                "timeout": f"D1 DB exceeded its time limit: {error}",
            }
            raise _error(words.get(error.code, str(error)), status=429 if error.code == "overloaded" else 408) from None
        except Exception as error:
            if (word := storage_word(error)) is None:
                raise
            raise _error(word[2], status=word[1]) from None


class GuardedDatabase:
    """A SQLite database that runs SQL of functions; a guard checks every statement."""

    def __init__(self, path: Path, max_bytes: int, history_s: float = 0.0) -> None:
        """`history_s` is how long its history is kept; 0 keeps none."""
        self._guard: StatementGuard | None = None
        self.history = WalHistory(path)
        self._archive = WalArchive(path, history_s) if history_s else None
        # No statement cache: a statement compiled while the guard was off must not be reused for a function's equal SQL.
        self._database = Database(path, self._prepare, self._finish, max_bytes=max_bytes, caches=False)

    async def run(self, work: Callable[[Connection, StatementGuard], T], time_limit_s: float) -> T:
        """Run `work` in the database's thread, within the time limit.
        Afterwards an open transaction is rolled back, and changed settings are reset."""

        def guarded_work(connection: Connection) -> T:
            assert self._guard is not None, "the connection was prepared before any work"
            try:
                return work(connection, self._guard)
            finally:
                if connection.in_transaction:
                    with self._guard.trusting():
                        connection.execute("ROLLBACK")
                self._guard.reset(connection)
                if self._archive is not None:
                    with self._guard.trusting():
                        self._archive.committed(connection)

        return await self._database.run(guarded_work, time_limit_s)

    async def close(self) -> None:
        await self._database.close()

    def _prepare(self, connection: Connection) -> None:
        if self._archive is not None:
            self._archive.attach(connection)
        self._guard = StatementGuard(connection, "batch()")

    def _finish(self, connection: Connection) -> None:
        if self._archive is not None and self._guard is not None:
            with self._guard.trusting():
                self._archive.close(connection)


def _one_on_each_line(sql: str) -> list[str]:
    """Split a script without semicolons into lines, each one statement, as the platform does.
    Return an empty list unless every line begins with a statement's verb, because a line with half a DELETE would delete all rows."""
    lines = [line for line in sql.splitlines() if line.strip()]
    is_script = len(lines) > 1 and ";" not in sql and all(line.split()[0].upper() in VERBS for line in lines)
    return lines if is_script else []


def _checked(parameters: list[Any]) -> tuple[Scalar, ...]:
    return tuple(_checked_parameter(value) for value in parameters)


def _checked_parameter(value: Any) -> Scalar:
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    kind = "object" if isinstance(value, dict) else type(value).__name__
    raise BindingError(
        f"D1_TYPE_ERROR: Type '{kind}' not supported for value {str(value)[:100]!r}; bind None, bool, int, float, str or bytes",
        code="D1_TYPE_ERROR",
    )


def _as_value(outcome: Outcome) -> dict[str, Any]:
    meta = {
        "served_by": "pilotlight.d1",
        "served_by_primary": True,
        "duration": round(outcome.duration_ms, 4),
        "timings": {"sql_duration_ms": round(outcome.duration_ms, 4)},
        "total_attempts": 1,
        "changes": outcome.changes,
        "last_row_id": outcome.last_row_id,
        "changed_db": outcome.changed_db,
        "size_after": outcome.size_after,
        "rows_read": outcome.rows_read,
        "rows_written": outcome.rows_written,
    }
    return {"columns": list(outcome.columns), "rows": outcome.rows, "meta": meta}


def _error(message: str, word: str = "D1_ERROR", status: int = 400) -> BindingError:
    return BindingError(f"{word}: {message}", code=word, status=status)
