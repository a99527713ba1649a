"""A read-only view of D1 databases and KV namespaces, for operators: a list, and pages of content.

Files are opened read-only on a separate connection, so nothing is changed and no function waits. The schema comes from a function and may be hostile:
only tables are shown, never views; names are quoted; SQLite cuts long values; a query has two seconds.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pilotlight.functions.bindings.storage.sql import RESERVED
from pilotlight.support.database import STEPS_BETWEEN_CHECKS
from pilotlight.wire.hop.management import FunctionStore, StoreKind, StorePage, StoreQuery

TIME_LIMIT_S = 2.0
MAX_CELL = 500  # characters shown of a value
MAX_TABLES = 500
MAX_COLUMNS = 100
LAST_ROW = 1 << 62  # SQLite refuses larger offsets
FILES: dict[StoreKind, str] = {"d1": "database.sqlite", "kv": "entries.sqlite"}
KV_COLUMNS = ("key", "value", "metadata", "expires")


class StoreReadError(Exception):
    """A store cannot be read; the message has the reason."""


class NoStoreError(StoreReadError):
    """The store or the table does not exist."""


def list_stores(state_dir: Path) -> tuple[FunctionStore, ...]:
    """List the stores of a site's functions, including those of removed functions."""
    found = []
    for kind, file in FILES.items():
        for path in sorted((state_dir / "bindings" / kind).glob(f"*/{file}")):
            found.append(FunctionStore(kind, path.parent.name, _owner(path.parent), path.stat().st_size))
    return tuple(found)


def read_page(state_dir: Path, query: StoreQuery, time_limit_s: float = TIME_LIMIT_S) -> StorePage:
    """Return one page of a store. Blocks, so call it in a thread. Raises StoreReadError."""
    path = state_dir / "bindings" / query.kind / query.name / FILES[query.kind]
    if query.name in (".", "..") or "/" in query.name or "\0" in query.name or not path.is_file():
        raise NoStoreError(f"this site has no {query.kind} store named {query.name!r}")
    try:
        with _opened(path, time_limit_s) as connection:
            return _keys(connection, query) if query.kind == "kv" else _table(connection, query)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise StoreReadError(f"the page was not read within {time_limit_s:g} s") from None
        raise StoreReadError(f"{query.name} cannot be read: {error}") from None


@contextmanager
def _opened(path: Path, time_limit_s: float) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=time_limit_s, uri=True)) as connection:
        deadline_s = time.monotonic() + time_limit_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, STEPS_BETWEEN_CHECKS)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = lambda data: data.decode(errors="replace")
        yield connection


def _table(connection: sqlite3.Connection, query: StoreQuery) -> StorePage:
    select = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name LIMIT ?"
    names = [name for (name,) in connection.execute(select, (MAX_TABLES,))]
    tables = tuple(name for name in names if not name.lower().startswith(RESERVED))
    if query.table and query.table not in tables:
        raise NoStoreError(f"the database {query.name} has no table named {query.table[:100]!r}")
    if not tables:
        return StorePage((), "", (), ())
    table, offset = query.table or tables[0], min(int(query.after), LAST_ROW) if query.after.isdecimal() else 0
    described = connection.execute("SELECT name FROM pragma_table_info(?) LIMIT ?", (table, MAX_COLUMNS))
    columns = tuple(name for (name,) in described)
    cells = ", ".join(map(_cell_of, columns))
    page = f"SELECT {cells} FROM {_quoted(table)} LIMIT ? OFFSET ?"
    rows = [tuple(map(_text, row)) for row in connection.execute(page, (query.limit + 1, offset))]
    more = str(offset + query.limit) if len(rows) > query.limit else ""
    return StorePage(tables, table, columns, tuple(rows[: query.limit]), more)


def _keys(connection: sqlite3.Connection, query: StoreQuery) -> StorePage:
    prefix = query.prefix.encode()
    select = (
        f"SELECT key, length(value), substr(value, 1, {4 * MAX_CELL}), metadata, expires_s FROM entries"
        " WHERE key >= ? AND key > ? AND substr(key, 1, ?) = ? AND (expires_s IS NULL OR expires_s > ?) ORDER BY key LIMIT ?"
    )
    given = (prefix, query.after.encode(), len(prefix), prefix, int(time.time()), query.limit + 1)
    found = connection.execute(select, given).fetchall()
    rows = tuple(
        (key.decode(errors="replace"), _value(value, size), _text(metadata), _text(expires_s))
        for key, size, value, metadata, expires_s in found[: query.limit]
    )
    more = rows[-1][0] if len(found) > query.limit else ""
    return StorePage((), "", KV_COLUMNS, rows, more)


def _cell_of(column: str) -> str:
    name = _quoted(column)
    return (
        f"CASE typeof({name}) WHEN 'blob' THEN length({name}) || ' bytes'"
        f" WHEN 'text' THEN substr({name}, 1, {MAX_CELL + 1}) ELSE {name} END"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _value(data: bytes, size: int) -> str:
    return f"{size} bytes" if b"\0" in data else _cut(data.decode(errors="replace"))


def _text(value: object) -> str | None:
    return None if value is None else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[:MAX_CELL] + "…"


def _owner(directory: Path) -> str:
    try:
        return (directory / "owner").read_text(encoding="utf-8")
    except OSError:
        return ""
