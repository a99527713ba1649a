"""The responses of one process, on its disk: they are there after a restart, for their tenants and for some time, and those that are being made are here.

A response is on the disk before its end is told, together with others that end meanwhile: nothing before its last event waits for that. A disk that
is full, or does not answer, costs what ends meanwhile, and whoever asks is told. A file that is damaged is set aside. One process has the file at a
time. Knows no HTTP.
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from dialects import response_rows as rows
from dialects.kept_responses import LOST, Conversation, Keeping, KeptResponse
from dialects.response_rows import ResponseRow
from wire.database import Connection, Database, DatabaseError, storage_word
from wire.errors import ApiError

ANSWERS_WITHIN_S = 5.0  # the disk
TRY_AGAIN_S = 5.0
ROOM_BYTES = 64 << 20  # in the file beyond what is kept, twice: for pages that are half empty

Result = TypeVar("Result")

log = logging.getLogger("pilotlight.responses")


class ResponseStore:
    """`sweep()` it from time to time; `close()` it."""

    def __init__(self, keeping: Keeping, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self.is_on = keeping.max_bytes > 0
        self._keeping = keeping
        self._clock = clock
        self._made: dict[tuple[str, str], KeptResponse] = {}  # in the background, by tenant and id; until it is written
        self._unwritten: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()
        self._database: Database | None = None
        self._lock_fd = -1
        self._fault: str | None = None
        self._is_closed = False

    async def keep(self, response: KeptResponse) -> bool:
        """Write a response, or what it is by now. Return whether it is on the disk."""
        write = _Write(response, ResponseRow.of(response), asyncio.get_running_loop().create_future())
        self._unwritten.append(write)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="responses")
        return await asyncio.shield(write.is_kept)

    async def begin(self, response: KeptResponse) -> None:
        """Keep a response that is going to be made. Raises ApiError where it cannot be found afterwards."""
        if not await self.keep(response):
            raise self._failing()
        self._made[response.tenant, response.id] = response

    async def settle(self, response: KeptResponse) -> None:
        """Write a response that has ended, however often that has to be tried: until then it is read from memory."""
        while not response.is_deleted and not await self.keep(response) and not self._is_closed:
            await asyncio.sleep(TRY_AGAIN_S)
        self._made.pop((response.tenant, response.id), None)

    async def find(self, name: str, tenant: str, param: str | None = None) -> KeptResponse:
        """Return a response. Raises ApiError: somebody else's is none."""
        if (made := self._made.get((tenant, name))) is not None:
            return made
        found = await self._do(partial(rows.find, tenant=tenant, name=name, since_s=self._since_s))
        if found is None:
            raise _unknown(name, param)
        return found[1]

    async def conversation(self, name: str, tenant: str, param: str) -> Conversation:
        """Return all that was said until a response's end. Raises ApiError."""
        if (made := self._made.get((tenant, name))) is not None:
            if not made.is_ended:
                raise ApiError("conflict", f"the response {name[:100]!r} has not ended yet", param=param)
            return Conversation(0, name, rows.joined(made.input, made.output))
        found = await self._do(partial(rows.conversation, tenant=tenant, name=name, since_s=self._since_s))
        if found is None:
            raise _unknown(name, param)
        return found

    async def input_items(self, response: KeptResponse) -> bytes:
        """Return all that a response was asked, as JSON with commas between. Raises ApiError."""
        if (response.tenant, response.id) in self._made:
            return response.input
        return await self._do(partial(rows.input_items, tenant=response.tenant, name=response.id))

    async def events(self, response: KeptResponse) -> list[bytes]:
        """Return the events of one that was made in the background; none where its process was lost. Raises ApiError."""
        return await self._do(partial(rows.events, tenant=response.tenant, name=response.id))

    async def items(self, names: Sequence[str], tenant: str) -> dict[str, bytes]:
        """Return those items of answers that are kept. Raises ApiError."""
        if not names:
            return {}
        return await self._do(partial(rows.items, tenant=tenant, names=names, since_s=self._since_s))

    async def delete(self, response: KeptResponse) -> None:
        """Raises ApiError."""
        response.is_deleted = True
        if response.task is not None:
            response.task.cancel()
            await asyncio.wait({response.task})
        self._made.pop((response.tenant, response.id), None)
        await self._do(partial(rows.delete, tenant=response.tenant, name=response.id), is_write=True)

    async def sweep(self) -> None:
        """Delete what is past its time. Raises ApiError."""
        while await self._do(partial(rows.sweep, until_s=self._since_s), is_write=True):
            continue
        await asyncio.to_thread(self._forget_damaged)

    async def close(self) -> None:
        """End those that are being made."""
        self._is_closed = True
        tasks = [made.task for made in self._made.values() if made.task is not None]
        for made in tuple(self._made.values()):
            made.end_as("failed", LOST)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writing is not None:
            await self._writing
        if self._database is not None:
            await self._database.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def _since_s(self) -> float:
        return self._clock() - self._keeping.keep_s

    async def _write(self) -> None:
        try:
            while self._unwritten:
                batch, self._unwritten = self._unwritten, []
                is_kept = await self._add([write.row for write in batch if not write.response.is_deleted])
                for write in batch:
                    write.is_kept.set_result(is_kept)
        finally:
            self._writing = None

    async def _add(self, found: list[ResponseRow]) -> bool:
        """Write them all or none."""
        try:
            add = partial(rows.add, rows=found, now_s=self._clock(), max_bytes=self._keeping.max_bytes)
            await self._do(add, is_write=True)
        except ApiError:  # which the log tells
            return False
        return True

    async def _do(self, work: Callable[[Connection], Result], *, is_write: bool = False) -> Result:
        """Raises ApiError."""
        if not self.is_on:
            raise ApiError("not_found", "responses are not kept here")
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S), self._using:
                result = await self._done(work, is_write=is_write)
        except TimeoutError:
            fault = f"its disk does not answer within {ANSWERS_WITHIN_S:g} s"
        except (sqlite3.Error, DatabaseError, OSError) as error:
            word = storage_word(error)
            fault = str(error) if word is None else word[2]
        else:
            if self._fault is not None:
                log.warning("responses are kept again in %s", self._keeping.path)
            self._fault = None
            return result
        if self._fault is None:
            log.error("responses cannot be kept in %s: %s", self._keeping.path, fault)
        self._fault = fault
        raise self._failing()

    async def _done(self, work: Callable[[Connection], Result], *, is_write: bool) -> Result:
        """Do the work, anew where its file has to be set aside first: a damaged page costs what is read there, and all only where none can be
        written. Raises sqlite3.Error, DatabaseError, OSError."""
        if self._database is None:
            self._database = await self._opened()
        try:
            return await self._database.run(work)
        except sqlite3.DatabaseError as error:
            if not (is_write and _is_damage(error)):
                raise
            await self._set_aside(self._database, error)
        self._database = await self._opened()
        return await self._database.run(work)

    async def _opened(self) -> Database:
        database = self._made_database()
        try:
            await database.run(_nothing)
        except BaseException as error:
            await database.close()
            if not _is_damage(error):
                raise
            await self._set_aside(database, error)
            database = self._made_database()
        return database

    def _made_database(self) -> Database:
        return Database(self._keeping.path, self._prepare, max_bytes=2 * self._keeping.max_bytes + ROOM_BYTES)

    def _prepare(self, connection: Connection) -> None:
        """Raises OSError where another process has the file."""
        if self._lock_fd < 0:
            self._lock_fd = _locked(self._keeping.path)
        rows.prepare(connection)

    async def _set_aside(self, database: Database, error: BaseException) -> None:
        await database.close()
        self._database = None
        log.error("%s is damaged and set aside, and responses are kept anew: %s", self._keeping.path, error)
        await asyncio.to_thread(_move, self._keeping.path)

    def _forget_damaged(self) -> None:
        for path in _damaged(self._keeping.path):
            if path.exists() and path.stat().st_mtime <= self._since_s:
                path.unlink()

    def _failing(self) -> ApiError:
        return ApiError("overloaded", f"responses cannot be kept at the moment: {self._fault}", retry_after_s=5)


class _Write(NamedTuple):
    response: KeptResponse
    row: ResponseRow
    is_kept: asyncio.Future[bool]


def _nothing(connection: Connection) -> None:
    """Open the file, no more."""


def _unknown(name: str, param: str | None) -> ApiError:
    sentence = f"there is no response {name[:100]!r} here: it was never kept, was never yours, or its time is over"
    return ApiError("not_found", sentence, param=param)


def _is_damage(error: BaseException) -> bool:
    word = storage_word(error) if isinstance(error, Exception) else None
    return word is not None and word[0] == "corrupt"


def _locked(path: Path) -> int:
    """Raises OSError."""
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError("another process keeps its own there: give each a responses.directory") from None
    return fd


def _damaged(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{end}") for end in (".damaged", ".damaged-wal")]


def _move(path: Path) -> None:
    """Raises OSError."""
    for end, kept in zip(("", "-wal"), _damaged(path), strict=True):
        kept.unlink(missing_ok=True)
        if (found := path.with_name(path.name + end)).exists():
            found.rename(kept)
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
