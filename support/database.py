"""Run SQLite with one thread for each file.

The thread executes one piece of work after another, each with a time limit. Work is a function of the connection. If its caller is cancelled, the
work is interrupted and its transaction rolled back. A commit is on the disk before its caller continues (WAL, synchronous=FULL). Callers decide which
SQL is allowed.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pilotlight.support.disk_errors import is_disk_full

T = TypeVar("T")


class Closing(Protocol):
    async def close(self) -> None: ...


ClosingT = TypeVar("ClosingT", bound=Closing)
Connection = sqlite3.Connection
Work = Callable[[Connection], T]

VERSION = 1  # of the tables of every file
TIME_LIMIT_S = 30.0
MAX_WAITING = 1000
STEPS_BETWEEN_CHECKS = 1000  # in instructions of SQLite's virtual machine; 1,000 take some microseconds
BUSY_TIMEOUT_S = 5.0  # time to wait for another process that writes the same file
PAGE_BYTES = 4096


class DatabaseError(Exception):
    """Work was not done, for a reason other than its SQL."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Database:
    """A database file with its thread and connection.
    `prepare` sets up a new connection: schema, limits. `finish` is called before it is closed. Both run in the database's thread."""

    def __init__(
        self,
        path: Path,
        prepare: Work[None] = lambda connection: None,
        finish: Work[None] = lambda connection: None,
        *,
        max_bytes: int = 10 << 30,
        caches: bool = True,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.path = path
        self._prepare, self._finish = prepare, finish
        self._max_bytes = max_bytes
        self._caches = caches
        self._max_waiting = max_waiting
        self._executor: ThreadPoolExecutor | None = None
        self._connection: Connection | None = None
        self._job: _Job | None = None
        self._waiting = 0

    async def run(self, work: Work[T], time_limit_s: float = TIME_LIMIT_S) -> T:
        """Run `work` in the database's thread and return its result. Raises its exceptions, and DatabaseError."""
        if self._waiting >= self._max_waiting:
            raise DatabaseError(
                f"{self._max_waiting} requests wait for this database already; send fewer at once", "overloaded"
            )
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"sqlite {self.path.name}")
        job = _Job(work, time_limit_s)
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._do, job)
        future.add_done_callback(self._done)
        try:
            result: T = await asyncio.shield(future)
            return result
        except asyncio.CancelledError:
            job.is_left = True
            raise

    async def close(self) -> None:
        if self._executor is None:
            return
        executor, self._executor = self._executor, None
        await asyncio.get_running_loop().run_in_executor(executor, self._close)
        executor.shutdown(wait=False)

    def _done(self, future: "asyncio.Future[Any]") -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # retrieve it even if the caller has left: asyncio reports unretrieved exceptions

    def _do(self, job: "_Job") -> Any:
        if job.is_left:
            raise DatabaseError("the caller has gone", "cancelled")
        connection = self._opened()
        job.deadline_s = time.monotonic() + job.time_limit_s
        self._job = job
        try:
            return job.work(connection)
        except sqlite3.OperationalError as error:
            # Errors that Python's sqlite3 module raises itself, such as for invalid text, have no SQLite error name.
            if getattr(error, "sqlite_errorname", "") != "SQLITE_INTERRUPT":
                raise
            if job.is_left:
                raise DatabaseError("the caller has gone", "cancelled") from None
            message = (
                f"the statement ran for longer than {job.time_limit_s:g} s and was stopped; make it touch fewer rows"
            )
            raise DatabaseError(message, "timeout") from None
        finally:
            self._job = None
            if connection.in_transaction:
                connection.rollback()

    def _opened(self) -> Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(
                self.path,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=128 if self._caches else 0,
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA max_page_count = {max(64, self._max_bytes // PAGE_BYTES)}")
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            connection.set_progress_handler(self._is_over, STEPS_BETWEEN_CHECKS)
            self._connection = connection
        return self._connection

    def _is_over(self) -> bool:
        """Return whether SQLite should interrupt its work. SQLite calls this while it works."""
        job = self._job
        return job is not None and (job.is_left or time.monotonic() > job.deadline_s)

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._finish(self._connection)
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


class _Job:
    def __init__(self, work: Work[Any], time_limit_s: float) -> None:
        self.work = work
        self.time_limit_s = time_limit_s
        self.deadline_s = float("inf")
        self.is_left = False


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Open a transaction; it is committed completely or not at all.
    It takes the write lock at once, so that it cannot fail halfway because another process writes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class Databases:
    """The open databases of a site by path. All users of a file share one thread and one connection."""

    def __init__(self) -> None:
        self._open: dict[Path, Closing] = {}

    def get(self, path: Path, make: Callable[[Path], ClosingT]) -> ClosingT:
        """Return the open object for the path; the first call makes it."""
        path = path.resolve()
        if path not in self._open:
            self._open[path] = make(path)
        return cast(ClosingT, self._open[path])

    async def close(self) -> None:
        databases, self._open = list(self._open.values()), {}
        for database in reversed(databases):  # a database that was opened later may use an earlier one
            await database.close()


def create(connection: Connection, schema: str) -> None:
    """Create missing tables. Raises DatabaseError for a file of a later version of Pilotlight."""
    with transaction(connection):
        claim_version(connection)
        for statement in schema.split(";"):
            connection.execute(statement)


def claim_version(connection: Connection) -> None:
    """Record the version of a file's tables. Raises DatabaseError if it is a later one."""
    (written,) = connection.execute("PRAGMA user_version").fetchone()
    if written > VERSION:
        sentence = f"its tables have version {written}, and this Pilotlight knows {VERSION}: a later version has written it. Install that version, "
        raise DatabaseError(f"{sentence}or restore a backup from before the upgrade", "newer")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the exclusive upper bound of the keys that begin with a prefix, or None if there is no bound."""
    stem = re.sub(rb"\xff+$", b"", prefix)
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def storage_word(error: Exception) -> tuple[str, int, str] | None:
    """Return (code, HTTP status, message) for a failure of the storage itself; None for any other."""
    if isinstance(error, DatabaseError):
        status = {"overloaded": 429, "timeout": 408}.get(error.code, 500)
        return error.code, status, str(error)
    name = getattr(error, "sqlite_errorname", "") or ""
    if name == "SQLITE_FULL" or is_disk_full(error):
        return "storage_full", 507, "the storage is full; delete something, or ask for more room"
    if name.startswith("SQLITE_IOERR"):
        return "storage_full", 507, f"the storage could not be written or read ({name}); its disk may be full"
    if name.startswith("SQLITE_BUSY"):
        return "busy", 503, "another process writes this database; try again"
    if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
        return "corrupt", 500, f"the database file is damaged ({name}); restore it from a copy"
    return None
