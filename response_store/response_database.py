"""The database of stored responses: a SQLite file, or PostgreSQL shared by routers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar


class Cursor(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class RowConnection(Protocol):
    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> Cursor: ...


Result = TypeVar("Result")
Work = Callable[[RowConnection], Result]


class ResponsesFault(Exception):
    """The database cannot be read or written right now."""

    def __init__(self, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.told = message if told is None else told


class ResponseDatabase(Protocol):
    is_shared: bool  # other processes use it, too
    name: str  # name in logs

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        """Run work in one transaction, one writer at a time. Raises ResponsesFault on failure or timeout."""

    async def tidy(self, keep_s: float) -> None:
        """Delete damaged files that were set aside more than `keep_s` ago."""

    async def close(self) -> None: ...


class RetentionPolicy(NamedTuple):
    """The database of stored responses, their total size, and their lifetime."""

    path: Path  # the SQLite file, which only this process uses
    max_bytes: int  # 0 to store no responses
    keep_s: float
    database: ResponseDatabase | None = None  # a database that routers share, instead of a file

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0
