"""The responses of one process, on its disk: there after a restart, for their tenants and for some time; those that are being made are here.

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
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from dialects import response_rows as rows
from dialects.kept_responses import LOST, Keeping, KeptResponse, PreviousResponse, joined
from dialects.response_rows import ResponseRow
from wire.database import Connection, Database, DatabaseError, storage_word
from wire.errors import ApiError

ANSWERS_WITHIN_S = 5.0  # the disk
FAILING_WITHIN_S = 0.2  # once it has not: nobody's end waits for it each time
TRY_AGAIN_S = 5.0
ROOM_BYTES = 64 << 20  # in the file beyond what is kept, twice: for pages that are half empty

Result = TypeVar("Result")

log = logging.getLogger("pilotlight.responses")


class ResponseStore:
    """`sweep()` it from time to time; `close()` it."""

    def __init__(self, keeping: Keeping, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._keeping = keeping
        self._clock = clock
        self._made: dict[tuple[str, str], KeptResponse] = {}  # in the background, by tenant and id; until it is written
        self._unwritten: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()
        self._database = Database(keeping.path, self._prepare, max_bytes=2 * keeping.max_bytes + ROOM_BYTES)
        self._is_open = False
        self._lock_fd = -1
        self._fault: str | None = None
        self._is_closed = False

    async def keep(self, response: KeptResponse, row: ResponseRow | None = None) -> bool:
        """Write a response, as a row or as it is by now. Return whether it is on the disk."""
        row = row or ResponseRow.of(response)
        write = _Write(response, row, asyncio.get_running_loop().create_future())
        self._unwritten.append(write)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="responses")
        return await asyncio.shield(write.is_kept)

    async def begin(self, response: KeptResponse) -> None:
        """Keep a response that is going to be made. Raises ApiError where it cannot be found afterwards."""
        self._made[response.tenant, response.id] = response
        if not await self.keep(response):
            del self._made[response.tenant, response.id]
            raise self._failing()

    async def end(self, response: KeptResponse, fields: dict[str, Any], event: bytes) -> None:
        """End one that is made in the background, with its last event: on the disk first, if that is possible."""
        row = ResponseRow.of(KeptResponse(response.tenant, fields, response.own, response.before))
        response.is_settled = await self.keep(response, row._replace(events=(*response.events, event)))
        response.fields = fields
        response.add_event(event)

    async def settle(self, response: KeptResponse) -> None:
        """Write a response that has ended, however often that has to be tried: until then it is read from memory."""
        while not (response.is_deleted or response.is_settled or await self.keep(response)) and not self._is_closed:
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

    async def conversation(self, name: str, tenant: str, param: str) -> PreviousResponse:
        """Return all that was said until a response's end. Raises ApiError."""
        if (made := self._made.get((tenant, name))) is not None:
            if not made.is_ended:
                raise ApiError("conflict", f"the response {name[:100]!r} has not ended yet", param=param)
            return PreviousResponse(0, name, joined(made.input, made.output))
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
        if not self._keeping.is_on:
            raise ApiError("not_found", "responses are not kept here")
        within_s = ANSWERS_WITHIN_S if self._fault is None else FAILING_WITHIN_S
        try:
            async with asyncio.timeout(within_s), self._using:
                result = await self._done(work, is_write=is_write)
        except TimeoutError:
            fault = "its disk does not answer in time"
        except (sqlite3.Error, DatabaseError, OSError, orjson.JSONDecodeError, zlib.error) as error:
            word = storage_word(error)
            fault = str(error) if word is None else word[2]
        else:
            if self._fault is not None:
                log.warning("responses are read and written again in %s", self._keeping.path)
            self._fault = None
            return result
        if self._fault is None:
            log.error("responses cannot be read or written in %s: %s", self._keeping.path, fault)
        self._fault = fault
        raise self._failing()

    async def _done(self, work: Callable[[Connection], Result], *, is_write: bool) -> Result:
        """Do the work, anew where its file has to be set aside first: a damaged page costs what is read there, and all only where the file cannot be
        opened or written. Raises sqlite3.Error, DatabaseError, OSError."""
        try:
            return await self._database.run(work)
        except (sqlite3.DatabaseError, orjson.JSONDecodeError) as error:
            if not _is_damage(error) or (self._is_open and not is_write):
                raise
            log.error("%s is damaged and set aside, and responses are kept anew: %s", self._keeping.path, error)
        await self._database.close()
        self._is_open = False
        await asyncio.to_thread(_move, self._keeping.path)
        return await self._database.run(work)

    def _prepare(self, connection: Connection) -> None:
        """Raises OSError where another process has the file."""
        if self._lock_fd < 0:
            self._lock_fd = _locked(self._keeping.path)
        rows.prepare(connection)
        for end in ("", "-wal", "-shm"):
            self._keeping.path.with_name(self._keeping.path.name + end).chmod(0o600)
        self._is_open = True

    def _forget_damaged(self) -> None:
        for path in _damaged(self._keeping.path):
            if path.exists() and path.stat().st_mtime <= self._since_s:
                path.unlink()

    def _failing(self) -> ApiError:
        sentence = f"kept responses cannot be read or written at the moment: {self._fault}"
        return ApiError("overloaded", sentence, retry_after_s=5)


class _Write(NamedTuple):
    response: KeptResponse
    row: ResponseRow
    is_kept: asyncio.Future[bool]


def _unknown(name: str, param: str | None) -> ApiError:
    sentence = f"there is no response {name[:100]!r} here: it was never kept, was never yours, or its time is over"
    return ApiError("not_found", sentence, param=param)


def _is_damage(error: Exception) -> bool:
    word = storage_word(error)
    return isinstance(error, orjson.JSONDecodeError) or (word is not None and word[0] == "corrupt")


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
