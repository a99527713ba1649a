"""Migrations of a D1 database: SQL files in the function's folder, each applied once.

Applied files are recorded in a table of the database itself, with the name and columns that wrangler uses.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.functions.bindings.binding import BindingError
from pilotlight.functions.bindings.storage.d1 import D1Database, Statement
from pilotlight.functions.bindings.storage.sql import statements_of

_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class MigrationFiles(NamedTuple):
    folder: Path
    table: str

    @classmethod
    def of(cls, options: Mapping[str, Any], directory: Path) -> "MigrationFiles":
        """Return the migration files of a database's declaration in the manifest. Raises BindingError."""
        table = str(options.get("migrations_table") or "d1_migrations")
        if not _TABLE_NAME.fullmatch(table):
            raise BindingError(f"migrations_table is not a valid table name: {table!r}")
        folder = directory / str(options.get("migrations_dir") or "migrations")
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise BindingError(f"migrations_dir is outside the function's folder: {folder}")
        return cls(folder, table)

    def all(self) -> list[Path]:
        """List the files in the order of their numbers."""
        return sorted(self.folder.glob("*.sql"), key=_order)

    async def waiting(self, database: D1Database) -> list[Path]:
        """List the files that have not been applied. Raises BindingError."""
        if not (files := self.all()):
            return []
        made = (
            f"CREATE TABLE IF NOT EXISTS {self.table} (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, "
            "applied_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL)"
        )
        found = await database.transaction([Statement(made), Statement(f"SELECT name FROM {self.table}")])
        applied = {row[0] for row in found[1]["rows"]}
        return [path for path in files if path.name not in applied]

    async def apply(self, database: D1Database, files: Sequence[Path], time_limit_s: float = float("inf")) -> None:
        """Apply the files in one transaction. Raises BindingError, which names the file that failed."""
        statements, names = [], []
        for path in files:
            its = [Statement(sql) for sql in statements_of(sql_of(path))]
            its.append(Statement(f"INSERT INTO {self.table} (name) VALUES (?)", [path.name]))
            statements += its
            names += [path.name] * len(its)
        await database.transaction(statements, time_limit_s, names)


def sql_of(path: Path) -> str:
    """Return a file's text. Raises BindingError."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BindingError(f"{path.name} cannot be read as text in UTF-8: {error}") from None


def _order(path: Path) -> tuple[float, str]:
    """Sort key: the number at the start of the file's name; files without a number come last."""
    number = re.match(r"\d+", path.name)
    return (int(number[0]) if number else float("inf"), path.name)
