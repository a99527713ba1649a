"""Journals: durable streams on a disk that routers share, so that a stream survives its router.

One file for each stream: the request, and the published parts of the answer, as frames (length and CRC-32 as two big-endian words, then MessagePack).
The router that works on a stream has its file locked (flock(2)), and only it writes. The kernel releases the lock when that router ends, in whatever
way, and not before: so another router takes over at once after a `kill -9`, and never while the first could still write, as it could with an expiring
lease. An incomplete frame at the end was never published. To stop a stream, its file is deleted. Files are read and written in a thread, because the
disk may be slow.
"""

import asyncio
import fcntl
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from struct import Struct as Words
from typing import Any

import msgspec

from pilotlight.wire.hop.continuation import AnswerName, ResumePoint

_NAME = re.compile(r"[0-9a-f]{32}")
_FRAME = Words(">II")
_MADE = "."  # prefix of the name of a file that is still being created
MOST_FRAME_BYTES = 1 << 30
SWEEP_S = 30.0


class JournalHeader(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stream's request, first in each journal.
    The key is not stored, because every reader has a key of the same tenant."""

    tenant: bytes
    method: str
    path: str
    target: str
    headers: tuple[tuple[str, str], ...]
    scheme: str
    address: str
    request_id: str
    body: bytes
    answer: AnswerName


class AnswerStarted(msgspec.Struct, frozen=True, tag="AnswerBegun", array_like=True):  # the tag of older journals
    """The start of an answer. `body` is set if it is not a stream."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes | None


class JournalEvents(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whole events, and the resume points that came with them."""

    events: bytes
    points: tuple[ResumePoint, ...]


class TakenOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The entry of a router that takes the stream over: it continues from here."""


class StreamEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The last entry of a stream."""


log = logging.getLogger(__name__)

Entry = JournalHeader | AnswerStarted | JournalEvents | TakenOver | StreamEnded

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class StreamStopped(Exception):
    """The stream was stopped: its file is deleted."""


class JournalFile:
    """One stream's file. Used by one thread at a time."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._at = 0  # the end of the last whole frame that was read or written

    def append(self, *entries: Entry) -> None:
        """Append entries; the lock must be held. Raises StreamStopped or OSError, with nothing written."""
        if not os.fstat(self._fd).st_nlink:
            raise StreamStopped
        data = memoryview(b"".join(map(_framed, entries)))
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._at + written)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._at)
            raise
        self._at += written

    def read(self) -> list[Entry]:
        """Return new entries. Raises OSError."""
        entries: list[Entry] = []
        while (entry := self._next()) is not None:
            entries.append(entry)
        return entries

    def take(self) -> bool:
        """Lock the file if no other router has it.
        Read the last entries of the previous router after this. Raises OSError."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def resume(self) -> None:
        """Continue a journal after the entries that were read. Raises StreamStopped, OSError."""
        os.ftruncate(self._fd, self._at)
        self.append(TakenOver())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file, which unlocks it for other routers."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next(self) -> Entry | None:
        head = os.pread(self._fd, _FRAME.size, self._at)
        if len(head) < _FRAME.size:
            return None
        length, checksum = _FRAME.unpack(head)
        data = os.pread(self._fd, length, self._at + _FRAME.size) if length <= MOST_FRAME_BYTES else b""
        if len(data) < length or zlib.crc32(data) != checksum:
            return None
        try:
            entry: Entry = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise OSError(f"{self.path} was written by another version: {error}") from None
        self._at += _FRAME.size + length
        return entry


class Journal:
    """One stream's file for use from an event loop. A thread does the work, in order.
    If the disk fails, the journal is lost and the stream continues."""

    def __init__(self, file: JournalFile, thread: ThreadPoolExecutor, *, is_ours: bool) -> None:
        self.is_ours = is_ours  # whether this router writes the file
        self.has_failed = False
        self.num_parts = 1  # each part is written by one router
        self._file = file
        self._thread = thread

    async def keep(self, *entries: Entry) -> None:
        """Append entries, if this router writes the file. Raises StreamStopped."""
        if not self.is_ours:
            return
        try:
            # Shielded: an entry that was started must be complete for the next router, even if this stream's work ends meanwhile.
            await asyncio.shield(self._aside(self._file.append, *entries))
        except StreamStopped:
            self.is_ours = False
            raise
        except OSError as error:
            log.error("a durable stream cannot be written to its journal and will end with this router: %s", error)
            self.is_ours, self.has_failed = False, True
            self._thread.submit(self._file.remove)

    async def read(self) -> list[Entry]:
        """Return new entries. Take the file if no router has it; then no other router adds entries.
        Raises OSError."""
        self.is_ours = await self._aside(self._file.take)
        entries: list[Entry] = await self._aside(self._file.read)
        self.num_parts += sum(isinstance(entry, TakenOver) for entry in entries)
        return entries

    async def resume(self) -> None:
        """Continue a journal that was taken. Raises StreamStopped, OSError."""
        await self._aside(self._file.resume)
        self.num_parts += 1

    async def is_there(self) -> bool:
        return self.has_failed or bool(await self._aside(self._file.path.exists))

    def remove(self) -> None:
        self.is_ours = False
        self._thread.submit(self._file.remove)

    def release(self, *entries: Entry) -> None:
        """Append the last entries and unlock the file, so that another router may write."""
        if self.is_ours and entries:
            self._thread.submit(self._file.append, *entries)
        self.is_ours = False
        self._thread.submit(self._file.close)

    def _aside(self, work: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


class Journals:
    """All journals of one folder, of this and other routers."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch, like the times of files. Raises OSError."""
        self._folder = folder
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "journals")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def begin(self, name: str, asked: JournalHeader) -> Journal | None:
        """Return a new journal; None if the disk refuses it."""
        try:
            file = await self._opened(self._create, name, asked)
        except OSError as error:
            log.error("a durable stream cannot be written to its journal and will end with this router: %s", error)
            return None
        assert file is not None
        return Journal(file, self._thread, is_ours=True)

    async def find(self, name: str) -> Journal | None:
        """Return the journal of this name; None if no journal has it. `name` is not trusted. Raises OSError."""
        file = await self._opened(self._open, name)
        return None if file is None else Journal(file, self._thread, is_ours=False)

    async def _opened(self, work: Callable[..., JournalFile | None], *arguments: object) -> JournalFile | None:
        """Open a file in the thread.
        If the caller is cancelled meanwhile, the file is closed, because it may be locked. Raises OSError."""
        opening = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    def _create(self, name: str, asked: JournalHeader) -> JournalFile:
        """Return a new, locked journal. It becomes visible only when it contains its request. Raises OSError."""
        made = self._folder / (_MADE + name)
        journal = JournalFile(
            self._folder / name, os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )
        try:
            journal.take()
            journal.append(asked)
            made.rename(journal.path)
        except BaseException:
            made.unlink(missing_ok=True)
            journal.close()
            raise
        return journal

    def _open(self, name: str) -> JournalFile | None:
        if not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        try:
            return JournalFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def parts(self, name: str) -> list[list[Entry]] | None:
        """Return a stream's entries, one list for each router that wrote them; None without such a stream.

        Raises OSError.
        """
        journal = self._open(name)
        if journal is None:
            return None
        try:
            parts: list[list[Entry]] = [[]]
            for entry in journal.read():
                if isinstance(entry, TakenOver):
                    parts.append([])
                else:
                    parts[-1].append(entry)
            return parts
        finally:
            journal.close()

    async def run(self, keep_s: float, max_bytes: float) -> None:
        """Sweep periodically until cancelled."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self.sweep, keep_s, max_bytes)
            except OSError as error:
                log.error("expired durable streams cannot be deleted: %s", error)
            await asyncio.sleep(min(SWEEP_S, keep_s))

    def close(self) -> None:
        """Wait for writes in progress."""
        self._thread.shutdown()

    def sweep(self, keep_s: float, max_bytes: float) -> None:
        """Delete old abandoned journals, and the oldest ones while the total size is too large.

        A journal is abandoned if no router works on it. Raises OSError if the folder cannot be read.
        """
        found = sorted(self._files(), key=lambda file: file[0])
        total = sum(size for _, size, _ in found)
        for changed_s, size, path in found:
            if total > max_bytes or self._clock() - changed_s > keep_s:
                try:
                    total -= size if _delete_if_free(path) else 0
                except OSError as error:
                    log.error("the expired durable stream %s cannot be deleted: %s", path, error)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name.removeprefix(_MADE)):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    yield stat.st_mtime, stat.st_size, path


def _close_unwanted(opening: "asyncio.Future[JournalFile | None]") -> None:
    if not opening.cancelled() and opening.exception() is None and (file := opening.result()) is not None:
        file.close()


def _delete_if_free(path: Path) -> bool:
    try:
        journal = JournalFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return True
    try:
        if journal.take():
            journal.path.unlink(missing_ok=True)
            return True
        return False
    finally:
        journal.close()


def _framed(entry: Entry) -> bytes:
    data = _encoder.encode(entry)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def points_of(entries: Iterable[Entry]) -> Iterator[ResumePoint]:
    for entry in entries:
        if isinstance(entry, JournalEvents):
            yield from entry.points
