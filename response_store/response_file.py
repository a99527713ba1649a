"""The SQLite file in which one process stores responses. A damaged file is renamed and replaced."""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson

from pilotlight.response_store import response_rows as rows
from pilotlight.response_store.response_database import ResponsesFault, Result, Work
from pilotlight.support.database import Connection, Database, DatabaseError, claim_version, storage_word, transaction

ROOM_BYTES = 64 << 20  # the file may take this much more than twice the stored bytes, because pages may be half empty
_TRIGGERS = """
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    INSERT INTO response_tenants VALUES (NEW.tenant, NEW.num_bytes) ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS response_changed AFTER UPDATE ON responses BEGIN
    UPDATE response_tenants SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER IF NOT EXISTS response_removed AFTER DELETE ON responses BEGIN
    UPDATE response_tenants SET num_bytes = num_bytes - OLD.num_bytes WHERE tenant = OLD.tenant;
    DELETE FROM response_tenants WHERE tenant = OLD.tenant AND num_bytes <= 0;
END;
"""

log = logging.getLogger("pilotlight.responses")


class ResponseFile:
    is_shared = False

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch."""
        self.name = str(path)
        self._path = path
        self._clock = clock
        self._database = Database(path, self._prepare, max_bytes=2 * max_bytes + ROOM_BYTES)
        self._using = asyncio.Lock()
        self._is_open = False
        self._lock_fd = -1

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        try:
            async with asyncio.timeout(within_s), self._using:
                return await self._done(work, is_write=is_write)
        except TimeoutError:
            raise ResponsesFault("its disk does not respond in time") from None
        except (sqlite3.Error, DatabaseError, OSError, orjson.JSONDecodeError, zlib.error) as error:
            word = storage_word(error)
            raise ResponsesFault(str(error) if word is None else word[2]) from None

    async def tidy(self, keep_s: float) -> None:
        await asyncio.to_thread(self._forget_damaged, keep_s)

    async def close(self) -> None:
        await self._database.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _done(self, work: Work[Result], *, is_write: bool) -> Result:
        """Run work. If the file is damaged, move it aside and run the work again with a new one.

        A damaged page loses only its own data; the whole file is lost only if it cannot be opened or written. Raises sqlite3.Error, DatabaseError,
        OSError.
        """

        def written(connection: Connection) -> Result:
            with transaction(connection):
                return work(connection)

        whole = written if is_write else work
        try:
            return await self._database.run(whole)
        except (sqlite3.DatabaseError, orjson.JSONDecodeError) as error:
            if not _is_damage(error) or (self._is_open and not is_write):
                raise
            log.error("%s is damaged and was set aside; a new file is used: %s", self._path, error)
        await self._database.close()
        self._is_open = False
        await asyncio.to_thread(_move, self._path)
        return await self._database.run(whole)

    def _prepare(self, connection: Connection) -> None:
        """Lock the file and create its tables. Raises OSError if another process has the file."""
        if self._lock_fd < 0:
            self._lock_fd = _locked(self._path)
        connection.create_function("now_s", 0, self._clock)
        _make_tables(connection)
        for end in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + end).chmod(0o600)
        self._is_open = True

    def _forget_damaged(self, keep_s: float) -> None:
        for path in _damaged(self._path):
            if path.exists() and path.stat().st_mtime <= self._clock() - keep_s:
                path.unlink()


def _make_tables(connection: Connection) -> None:
    claim_version(connection)
    tables = rows.schema("INTEGER PRIMARY KEY AUTOINCREMENT", "BLOB")
    connection.executescript(f"BEGIN IMMEDIATE; {tables}; {_TRIGGERS} COMMIT")


def _is_damage(error: Exception) -> bool:
    word = storage_word(error)
    return isinstance(error, orjson.JSONDecodeError) or (word is not None and word[0] == "corrupt")


def _locked(path: Path) -> int:
    """Lock the file; return the lock's descriptor. Raises OSError."""
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(
            "another process stores responses in it: give each process a different responses.directory"
        ) from None
    return fd


def _damaged(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{end}") for end in (".damaged", ".damaged-wal")]


def _move(path: Path) -> None:
    """Rename the damaged file. Raises OSError."""
    for end, kept in zip(("", "-wal"), _damaged(path), strict=True):
        kept.unlink(missing_ok=True)
        if (found := path.with_name(path.name + end)).exists():
            found.rename(kept)
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
