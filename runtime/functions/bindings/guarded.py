"""A database that functions write their own SQL to: its connection, and the guard that looks at every statement."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from runtime.functions.bindings.database import Connection, Database, Databases, create
from runtime.functions.bindings.sql import StatementGuard

T = TypeVar("T")
GuardedWork = Callable[[Connection, StatementGuard], T]


class GuardedDatabase:
    def __init__(self, path: Path, transactions_by: str, schema: str, max_bytes: int) -> None:
        """`transactions_by` is what an author is told to use instead of BEGIN."""
        self._transactions_by = transactions_by
        self._schema = schema
        self._guard: StatementGuard | None = None
        # No cache of statements: one that was compiled while the guard trusted must not be found again by the same words.
        self._database = Database(path, self._prepare, max_bytes=max_bytes, caches=False)

    async def run(self, work: GuardedWork[T], time_limit_s: float) -> T:
        """A transaction that the work leaves open is rolled back, and settings that it leaves are undone."""

        def guarded_work(connection: Connection) -> T:
            assert self._guard is not None, "the connection was prepared before any work"
            try:
                return work(connection, self._guard)
            finally:
                if connection.in_transaction:
                    with self._guard.trusting():
                        connection.execute("ROLLBACK")
                self._guard.reset(connection)

        return await self._database.run(guarded_work, time_limit_s)

    async def close(self) -> None:
        await self._database.close()

    def _prepare(self, connection: Connection) -> None:
        create(connection, self._schema)
        self._guard = StatementGuard(connection, self._transactions_by)


def open_guarded(
    databases: Databases, path: Path, transactions_by: str, schema: str = "", *, max_bytes: int
) -> GuardedDatabase:
    """The guarded database of a path: all who bind it share its thread, its connection and its guard."""
    return databases.get(path, lambda path: GuardedDatabase(path, transactions_by, schema, max_bytes))
