"""Point-in-time recovery of a SQLite file: its write-ahead log (WAL) is copied before each checkpoint.

The content at any second of the last days can be rebuilt.

A *base* is a copy of the file; a *segment* is a whole WAL with the commits after it. Both are numbered: segment N follows base N or segment N - 1.
The file `N.times` has the time of each commit of segment N. To recover, SQLite checkpoints a base with a segment as its WAL, then the next segment,
and so on; the last segment is cut after the wanted commit. The format of a WAL: https://www.sqlite.org/fileformat2.html#the_write_ahead_log.

Only the process with the lock writes a file's history. If another program has checkpointed the file, a new base is made. All methods run in the
thread of the file's connection.
"""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from pilotlight.support import atomic_files
from pilotlight.support.database import Connection

log = logging.getLogger("pilotlight.bindings")

SEGMENT_BYTES = 4 << 20  # a larger WAL becomes a segment and is checkpointed; SQLite's own default is 1,000 pages
# Bytes of segments since the last base, after which another base is made. For a file that is larger than this, the file's size applies.
SMALL_BYTES = 4 << 20
WAL_HEADER, FRAME_HEADER = 32, 24
TIMES = struct.Struct("<dQ")  # Unix time in seconds, and the WAL's size in bytes after the commit


class HistoryError(Exception):
    """The wanted moment cannot be rebuilt."""


class Bookmark(NamedTuple):
    """A commit: the number of its segment, and the segment's size in bytes after the commit."""

    number: int
    offset: int

    def __str__(self) -> str:
        return f"{self.number:08x}-{self.offset:08x}"

    @classmethod
    def parse(cls, text: str) -> "Bookmark":
        """Parse the text of a bookmark. Raises HistoryError."""
        try:
            number, _, offset = text.partition("-")
            return cls(int(number, 16), int(offset, 16))
        except ValueError:
            raise HistoryError(f"{text!r} is not a bookmark; an example is {cls(1, 4152)}") from None


class Commit(NamedTuple):
    """The end of a commit in a WAL: its offset in bytes, and the salt that identifies the WAL."""

    offset: int
    salt: bytes


class Moment(NamedTuple):
    at_s: float
    bookmark: Bookmark


class WalHistory:
    """The history of a file, which any process may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_suffix(".history")
        self._wal = Path(f"{path}-wal")

    def first(self) -> Moment | None:
        """Return the earliest moment that can be rebuilt; None if there is none."""
        return next(self._moments(), None)

    def at(self, at_s: float) -> Moment:
        """Return the last commit at or before a time. Raises HistoryError if the history begins later."""
        found = None
        for moment in self._moments():
            if moment.at_s > at_s:
                break
            found = moment
        if found is None:
            first = self.first()
            when = "there is none" if first is None else f"it begins at {_stamp_of(first.at_s)}"
            raise HistoryError(f"the history does not reach back to {_stamp_of(at_s)}: {when}")
        return found

    def now(self) -> Bookmark:
        """Return the bookmark of the current content."""
        return Bookmark(self._next(), _last_commit(self._wal, Commit(0, b"")).offset)

    def build(self, bookmark: Bookmark, target: Path) -> None:
        """Write the file's content at a bookmark to a new file. Raises HistoryError."""
        bases = [number for number in self._numbers("base") if number <= bookmark.number]
        if not bases:
            raise HistoryError(f"the history does not reach back to {bookmark}")
        shutil.copyfile(self._file(bases[-1], "base"), target)
        for number in range(bases[-1], bookmark.number + 1):
            size = bookmark.offset if number == bookmark.number else None
            if size != 0:
                self._replay(number, size, target)

    def _replay(self, number: int, size: int | None, target: Path) -> None:
        segment, wal = self._file(number, "wal"), Path(f"{target}-wal")
        if not segment.is_file() and self._wal.is_file() and number == self._next():
            with suppress(FileNotFoundError):
                shutil.copyfile(self._wal, wal)
        if segment.is_file():  # also true if the WAL became a segment just now
            shutil.copyfile(segment, wal)
        if not wal.is_file() or (size is not None and wal.stat().st_size < size):
            raise HistoryError(f"the history has a gap at {Bookmark(number, size or 0)}")
        if size is not None:
            os.truncate(wal, size)
        with closing(sqlite3.connect(target, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # no sync needed: after a crash the file is built again
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _moments(self) -> Iterator[Moment]:
        """Yield all moments, oldest first."""
        for number in self._numbers("times"):
            with suppress(FileNotFoundError):
                data = self._file(number, "times").read_bytes()
                for at_s, offset in TIMES.iter_unpack(data[: len(data) // TIMES.size * TIMES.size]):
                    yield Moment(at_s, Bookmark(number, offset))

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(path.stem, 16) for path in self.folder.glob(f"*.{kind}"))

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:08x}.{kind}"

    def _next(self) -> int:
        """Return the number of the segment that the live WAL will become."""
        return max((0, *self._numbers("base"), *(number + 1 for number in self._numbers("wal"))))


class WalArchive(WalHistory):
    """Writes the history of a file, in the process that has its connection."""

    def __init__(
        self,
        path: Path,
        kept_s: float,
        now_s: Callable[[], float] = time.time,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__(path)
        self._kept_s = kept_s
        self._now_s = now_s
        self._segment_bytes = segment_bytes
        self._lock: int | None = None
        # The database's file, kept open as long as its connection. POSIX locks belong to a process and a file: closing it earlier would drop SQLite's
        # locks, and another program would then delete the WAL as its last user.
        self._source: int | None = None
        self._number = 0
        self._last = Commit(0, b"")  # the last recorded commit of the live WAL
        self._since_base = 0  # bytes of segments since the last base

    def attach(self, connection: Connection) -> None:
        """Record what this connection commits from now on, unless another process records already."""
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return
            self._lock = lock
            self._number = self._next()
            bases = self._numbers("base")
            if bases and self._stamp() == self._kept_stamp():
                kept = [number for number in self._numbers("wal") if number >= bases[-1]]
                self._since_base = sum(self._file(number, "wal").stat().st_size for number in kept)
                self._note(connection)
            else:
                self._begin(connection)
            self._forget()
        except OSError as error:
            self._give_up(connection, error)

    def committed(self, connection: Connection) -> None:
        """Record the last commit, if it is new; archive and checkpoint a WAL that has grown long."""
        if self._lock is None:
            return
        try:
            self._note(connection)
            if self._last.offset >= self._segment_bytes:
                self._keep(connection)
        except OSError as error:
            self._give_up(connection, error)

    def close(self, connection: Connection) -> None:
        self._end(connection)
        if self._source is not None:
            os.close(self._source)
            self._source = None

    def _end(self, connection: Connection) -> None:
        if self._lock is None:
            return
        try:
            self._note(connection)
            self._keep(connection)
        except OSError as error:
            self._give_up(connection, error)
        else:
            os.close(self._lock)
            self._lock = None

    def _note(self, connection: Connection) -> None:
        last = _last_commit(self._wal, self._last)
        if self._last.offset and last.salt != self._last.salt:  # another program has checkpointed the file
            self._begin(connection)
        elif last.offset != self._last.offset:
            self._last = last
            self._write_time(last.offset)

    def _write_time(self, offset: int) -> None:
        now_s = self._now_s()
        times = self._file(self._number, "times")
        with open(times, "rb+" if times.exists() else "wb+") as file:
            size = file.seek(0, os.SEEK_END) // TIMES.size * TIMES.size
            if size:
                file.seek(size - TIMES.size)
                before_s, before = TIMES.unpack(file.read(TIMES.size))
                if before >= offset:
                    return  # an earlier process has recorded this commit
                if before and int(before_s) == int(now_s):
                    size -= TIMES.size  # replace the entry: one per second, for its last commit
            file.seek(size)
            file.truncate()
            file.write(TIMES.pack(now_s, offset))

    def _keep(self, connection: Connection) -> None:
        """Archive the WAL as a segment and checkpoint it."""
        if not self._last.offset:
            return
        segment = self._file(self._number, "wal")
        before = _data_version(connection)
        with open(self._wal, "rb") as wal:
            _copy(wal.fileno(), segment, self._last.offset)
        if not self._checkpoint(connection):
            segment.unlink()  # another process is reading: try again after a later commit
            return
        self._since_base += self._last.offset
        self._number, self._last = self._number + 1, Commit(0, b"")
        if _data_version(connection) != before or self._since_base > max(SMALL_BYTES, self.path.stat().st_size):
            self._copy_base()  # also needed if another process committed after the copy of the WAL
        self._forget()

    def _begin(self, connection: Connection) -> None:
        """Checkpoint and start with a new base, because another program changed the file. Raises OSError."""
        if not self._checkpoint(connection):
            raise BlockingIOError("another process reads the file")
        self._number, self._last = self._next() + 1, Commit(0, b"")
        self._copy_base()

    def _copy_base(self) -> None:
        """Copy the file as a new base. Raises OSError."""
        before = self._stamp()
        if self._source is None:
            self._source = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        _copy(self._source, self._file(self._number, "base"), before[0])
        if self._stamp() != before:
            raise BlockingIOError("another program writes the file")
        self._file(self._number, "times").write_bytes(TIMES.pack(self._now_s(), 0))
        self._since_base = 0

    def _checkpoint(self, connection: Connection) -> bool:
        """Checkpoint; return whether the whole WAL is now in the file."""
        try:
            is_busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError:  # this connection itself is reading
            return False
        if not is_busy:
            atomic_files.write(self.folder / "stamp", json.dumps(self._stamp()).encode())
        return not is_busy

    def _forget(self) -> None:
        """Delete the files before the newest base that is older than the kept period."""
        oldest_s = self._now_s() - self._kept_s
        bases = [moment for moment in self._moments() if moment.bookmark.offset == 0 and moment.at_s <= oldest_s]
        if not bases:
            return
        for path in self.folder.glob("*.*"):
            if path.suffix in (".base", ".wal", ".times") and int(path.stem, 16) < bases[-1].bookmark.number:
                path.unlink(missing_ok=True)

    def _give_up(self, connection: Connection, error: OSError) -> None:
        """Stop recording until the file is opened again; a new base is made then.
        The database itself stays intact."""
        log.error("%s: its history is not recorded until it is opened again: %s", self.path, error)
        with suppress(OSError):
            (self.folder / "stamp").unlink(missing_ok=True)
        connection.execute("PRAGMA wal_autocheckpoint = 1000")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _stamp(self) -> list[int]:
        """Return the file's size in bytes and modification time in ns.
        They change when the file itself is written, not when its WAL is."""
        status = self.path.stat()
        return [status.st_size, status.st_mtime_ns]

    def _kept_stamp(self) -> list[int] | None:
        try:
            found: list[int] = json.loads((self.folder / "stamp").read_bytes())
            return found
        except (FileNotFoundError, ValueError):
            return None


def _last_commit(wal: Path, known: Commit) -> Commit:
    """Return the last commit of a WAL.
    The search starts at `known` if that commit belongs to the same WAL."""
    try:
        file = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Commit(0, b"")
    try:
        size = os.fstat(file).st_size
        header = os.pread(file, WAL_HEADER, 0)
        if len(header) < WAL_HEADER:
            return Commit(0, b"")
        salt = header[16:24]
        found = known.offset if salt == known.salt else 0
        place, frame = found or WAL_HEADER, FRAME_HEADER + int.from_bytes(header[8:12], "big")
        while place + frame <= size:
            head = os.pread(file, FRAME_HEADER, place)
            if head[8:16] != salt:
                break  # the frame belongs to an earlier WAL
            place += frame
            if head[4:8] != b"\0\0\0\0":
                found = place
        return Commit(found, salt)
    finally:
        os.close(file)


def _data_version(connection: Connection) -> int:
    """Return a number that changes when another connection commits."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _copy(source: int, target: Path, size: int) -> None:
    """Copy the first `size` bytes of an open file, atomically for readers of `target`."""
    part = target.with_suffix(".part")
    with open(part, "wb") as writing:
        at = 0
        while at < size and (data := os.pread(source, min(size - at, 1 << 20), at)):
            at += writing.write(data)
        writing.flush()
        os.fsync(writing.fileno())
    os.replace(part, target)


def _stamp_of(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
