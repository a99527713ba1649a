"""SQL of functions on a SQLite connection: allowed statements, limits of time and size, and results.

SQLite's authorizer checks every statement before it runs. Refused are other files (ATTACH, VACUUM INTO), pragmas that change the database's settings,
explicit transactions, extensions, temporary tables, and the tables named `_cf_*`, which belong to the runtime. Limits are the platform's documented
ones.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pilotlight.support.database import Connection

MAX_SQL_BYTES = 100_000
MAX_VALUE_BYTES = 2_000_000  # per string, blob or row
MAX_PARAMETERS = 100
MAX_COLUMNS = 100
MAX_RESULT_BYTES = 16 << 20  # limit of a result, because a reply is one message of at most 32 MiB
ROWS_AT_ONCE = 256
RESERVED = "_cf_"

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_BYTES,
    sqlite3.SQLITE_LIMIT_COLUMN: MAX_COLUMNS,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: MAX_PARAMETERS,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
READING_PRAGMAS = frozenset({
    "table_list", "table_info", "table_xinfo", "index_list", "index_info", "index_xinfo", "foreign_key_list", "foreign_key_check", "quick_check",
    "optimize", "foreign_keys", "user_version", "data_version", "page_count", "page_size", "collation_list", "function_list", "pragma_list",
})  # fmt: skip
# Pragmas that functions may set. They are reset at the end of each call, because all users of the database share the connection.
LASTING_PRAGMAS = (
    "defer_foreign_keys", "ignore_check_constraints", "legacy_alter_table", "recursive_triggers", "reverse_unordered_selects", "case_sensitive_like",
)  # fmt: skip
TAKES_A_NAME = frozenset({
    "table_info", "table_xinfo", "index_list", "index_info", "index_xinfo", "foreign_key_list", "foreign_key_check", "quick_check", "table_list",
    "optimize",
})  # fmt: skip
TABLE_MODULES = frozenset({"fts5", "fts5vocab", "rtree"})
FORBIDDEN_FUNCTIONS = frozenset(
    {"load_extension", "fts3_tokenizer", "sqlite_dbpage", "dbstat", "zipfile", "writefile", "readfile", "edit"}
)

_TABLE_ACTIONS = {
    sqlite3.SQLITE_READ: 0, sqlite3.SQLITE_INSERT: 0, sqlite3.SQLITE_UPDATE: 0, sqlite3.SQLITE_DELETE: 0, sqlite3.SQLITE_CREATE_TABLE: 0,
    sqlite3.SQLITE_DROP_TABLE: 0, sqlite3.SQLITE_ALTER_TABLE: 1, sqlite3.SQLITE_CREATE_INDEX: 1, sqlite3.SQLITE_CREATE_TRIGGER: 1,
    sqlite3.SQLITE_CREATE_VIEW: 0,
}  # fmt: skip
_TEMPORARY = frozenset({
    sqlite3.SQLITE_CREATE_TEMP_INDEX, sqlite3.SQLITE_CREATE_TEMP_TABLE, sqlite3.SQLITE_CREATE_TEMP_TRIGGER, sqlite3.SQLITE_CREATE_TEMP_VIEW,
    sqlite3.SQLITE_DROP_TEMP_INDEX, sqlite3.SQLITE_DROP_TEMP_TABLE, sqlite3.SQLITE_DROP_TEMP_TRIGGER, sqlite3.SQLITE_DROP_TEMP_VIEW,
})  # fmt: skip


class Outcome(NamedTuple):
    columns: tuple[str, ...]
    rows: list[list[Any]]
    changes: int
    last_row_id: int
    rows_written: int
    changed_db: bool
    size_after: int
    duration_ms: float

    @property
    def rows_read(self) -> int:
        """Return the number of rows returned or changed.
        The platform also counts rows that a scan skipped, which SQLite does not report."""
        return len(self.rows) + self.rows_written


class SqlError(Exception):
    """A statement was refused or failed; the message has SQLite's text and the name of its error code."""

    def __init__(self, message: str, code_name: str) -> None:
        super().__init__(f"{message}: {code_name}")
        self.code_name = code_name


class StatementGuard:
    """The authorizer of one connection: decides which statements of functions may run."""

    def __init__(self, connection: Connection, transactions_by: str) -> None:
        """`transactions_by` is what the error message for BEGIN recommends instead."""
        self._transactions_by = transactions_by
        self._is_trusting = False
        self._touched: set[str] = set()
        self.why = ""
        for category, limit in LIMITS.items():
            connection.setlimit(category, limit)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = lambda data: data.decode(errors="replace")
        connection.set_authorizer(self._decide)

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Return a scope in which the runtime's own statements are not checked."""
        before, self._is_trusting = self._is_trusting, True
        try:
            yield
        finally:
            self._is_trusting = before

    def reset(self, connection: Connection) -> None:
        """Reset the pragmas that functions set since the last reset."""
        with self.trusting():
            for pragma in self._touched:
                connection.execute(f"PRAGMA {pragma} = 0")
        self._touched.clear()

    def _decide(self, action: int, first: str | None, second: str | None, schema: str | None, inner: str | None) -> int:
        if self._is_trusting:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() == "foreign_keys" and second is not None:
            return sqlite3.SQLITE_IGNORE  # accepted and ignored, as in D1: migration tools write it around every table
        why = self._objection(action, first or "", second)
        if why:
            self.why = why
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def _objection(self, action: int, first: str, second: str | None) -> str:
        position = _TABLE_ACTIONS.get(action)
        if position is not None:
            table = first if position == 0 else second or ""
            return f"the table {table} is the runtime's" if table.lower().startswith(RESERVED) else ""
        if action == sqlite3.SQLITE_PRAGMA:
            return self._objection_to_pragma(first.lower(), second)
        if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
            return "ATTACH, DETACH and VACUUM reach other files"
        if action in (sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT):
            return f"use {self._transactions_by} instead of BEGIN, COMMIT and SAVEPOINT"
        if action in _TEMPORARY:
            return "temporary tables would be visible to all functions that bind this database"
        if action == sqlite3.SQLITE_CREATE_VTABLE and (second or "").lower() not in TABLE_MODULES:
            return f"virtual tables are those of {', '.join(sorted(TABLE_MODULES))}"
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN_FUNCTIONS:
            return f"the function {second} is not offered"
        return ""

    def _objection_to_pragma(self, name: str, value: str | None) -> str:
        if name in LASTING_PRAGMAS:
            if value is not None:
                self._touched.add(name)
            return ""
        if name not in READING_PRAGMAS:
            return f"PRAGMA {name} is not offered"
        return "" if value is None or name in TAKES_A_NAME else f"PRAGMA {name} can be read only"


def execute(connection: Connection, guard: StatementGuard, sql: str, parameters: Sequence[Any] = ()) -> Outcome:
    """Execute one statement. Raises SqlError, or sqlite3.Error if the storage fails or time runs out."""
    started_s = time.perf_counter()
    changes_before = connection.total_changes
    with as_sql_errors(guard):
        cursor = connection.execute(sql, tuple(parameters))
        try:
            columns = tuple(column[0] for column in cursor.description or ())
            rows = _fetched(cursor)
        finally:
            cursor.close()
    duration_ms = (time.perf_counter() - started_s) * 1e3
    written = connection.total_changes - changes_before
    with guard.trusting():
        last_row_id, pages, page_bytes = connection.execute(
            "SELECT last_insert_rowid(), page_count, page_size FROM pragma_page_count, pragma_page_size"
        ).fetchone()
    changed = written > 0 or (not columns and _changes_the_schema(sql))
    return Outcome(columns, rows, written, last_row_id, written, changed, pages * page_bytes, duration_ms)


@contextmanager
def as_sql_errors(guard: StatementGuard) -> Iterator[None]:
    guard.why = ""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None)
        if name is None:  # raised by Python's module: wrong bindings, several statements, integers above 64 bits
            code_name = "SQLITE_TOOBIG" if "too large" in str(error) else "SQLITE_ERROR"
            raise SqlError(_own_words(str(error)), code_name) from None
        if name == "SQLITE_INTERRUPT" or name.startswith(
            ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_CORRUPT", "SQLITE_NOTADB")
        ):
            raise
        message = f"not authorized: {guard.why}" if name == "SQLITE_AUTH" and guard.why else str(error)
        raise SqlError(message, _primary(name)) from None
    except OverflowError as error:
        raise SqlError(f"an integer of more than 64 bits: {error}", "SQLITE_MISMATCH") from None
    except (ValueError, UnicodeEncodeError) as error:  # a NUL in the SQL, or a lone surrogate
        raise SqlError(f"the statement is not valid text: {error}", "SQLITE_ERROR") from None


def statements_of(script: str, is_complete: Callable[[str], bool] = sqlite3.complete_statement) -> list[str]:
    """Split a script into statements.
    Semicolons inside strings, comments and triggers do not end a statement."""
    statements: list[str] = []
    start = position = 0
    while (found := script.find(";", position)) >= 0:
        position = found + 1
        if is_complete(script[start:position]):
            statements.append(script[start:position].strip())
            start = position
    statements.append(script[start:].strip())
    return [statement for statement in statements if _says_something(statement)]


def _fetched(cursor: sqlite3.Cursor) -> list[list[Any]]:
    rows: list[list[Any]] = []
    size = 0
    while batch := cursor.fetchmany(ROWS_AT_ONCE):
        for row in batch:
            size += 16 + sum(len(value) if isinstance(value, (str, bytes)) else 9 for value in row)
            rows.append(list(row))
        if size > MAX_RESULT_BYTES:
            raise SqlError(
                f"the result is larger than {MAX_RESULT_BYTES} bytes; ask for fewer rows with LIMIT", "SQLITE_TOOBIG"
            )
    return rows


def _changes_the_schema(sql: str) -> bool:
    return sql.lstrip()[:6].upper() in ("CREATE", "DROP T", "DROP I", "DROP V", "ALTER ")


def _primary(name: str) -> str:
    """Return the primary name of an extended error code: SQLITE_CONSTRAINT for SQLITE_CONSTRAINT_UNIQUE."""
    return "_".join(name.split("_")[:2])


def _own_words(message: str) -> str:
    if "one statement at a time" in message:
        return "this is more than one statement; use exec() or batch()"
    if "Incorrect number of bindings" in message:
        return f"wrong number of parameter bindings for SQL query ({message})"
    return message


def _says_something(statement: str) -> bool:
    lines = (line.strip() for line in statement.splitlines())
    return any(line and not line.startswith("--") and line != ";" for line in lines)
