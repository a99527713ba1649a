"""Point-in-time recovery of a SQLite file: its write-ahead log (WAL) is copied before each checkpoint.

The content at any second of the last days can be rebuilt.

A *base* is a copy of the file; a *segment* is a whole WAL with the commits after it. Both are numbered: segment N follows base N or segment N - 1.
The file `N.times` has the time of each commit of segment N. To recover, SQLite checkpoints a base with a segment as its WAL, then the next segment,
and so on; the last segment is cut after the wanted commit. The format of a WAL: https://www.sqlite.org/fileformat2.html#the_write_ahead_log.

Only the process with the lock writes a file's history. If another program has checkpointed the file, a new base is made. All methods run in the
thread of the file's connection.

A *lazy* archive is for files that are many and small: until the first checkpoint the file is its own base, so it is not copied before.
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
from pilotlight.support.directory_locks import alone_in

log = logging.getLogger("pilotlight.bindings")

SEGMENT_BYTES = 4 << 20  # a larger WAL becomes a segment and is checkpointed; SQLite's own default is 1,000 pages
REST_BYTES = 256 << 10  # a shorter WAL of a lazy archive stays beside the closed file; reading it again takes 0.2 ms
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
        return Bookmark(self._next(), self.last_offset())

    def last_offset(self) -> int:
        """Return the size of the live WAL in bytes after its last commit."""
        return _last_commit(self._wal, Commit(0, b"")).offset

    def check(self, bookmark: Bookmark) -> None:
        """Raise HistoryError if a bookmark's content cannot be built."""
        for number in range(self._base_of(bookmark), bookmark.number):
            if not self._file(number, "wal").is_file():
                raise HistoryError(f"the history has a gap at {Bookmark(number, 0)}")

    def build(self, bookmark: Bookmark, target: Path) -> None:
        """Write the file's content at a bookmark to a new file. Raises HistoryError."""
        base = self._base_of(bookmark)
        self._copy_base_to(base, target)
        for number in range(base, bookmark.number + 1):
            size = bookmark.offset if number == bookmark.number else None
            if size != 0:
                self._replay(number, size, target)

    def _base_of(self, bookmark: Bookmark) -> int:
        """Return the number of the base from which a bookmark's content is built. Raises HistoryError."""
        bases = [number for number in self._numbers("base") if number <= bookmark.number]
        if not bases:
            raise HistoryError(f"the history does not reach back to {bookmark}")
        return bases[-1]

    def _copy_base_to(self, number: int, target: Path) -> None:
        shutil.copyfile(self._file(number, "base"), target)

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
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(name[: -len(kind) - 1], 16) for name in names if name.endswith("." + kind))

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:08x}.{kind}"

    def _next(self) -> int:
        """Return the number of the segment that the live WAL will become."""
        kept = (number + 1 for number in self._numbers("wal"))
        return max((0, *self._numbers("base"), *self._numbers("times"), *kept))


class WalArchive(WalHistory):
    """Writes the history of a file, in the process that has its connection."""

    def __init__(
        self,
        path: Path,
        kept_s: float,
        now_s: Callable[[], float] = time.time,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        is_lazy: bool = False,
    ) -> None:
        super().__init__(path)
        self._is_lazy = is_lazy
        self._unwritten: Moment | None = None  # the last commit of a lazy archive, until one in a later second
        self._is_own_base = False  # the file itself is the base of the live WAL: it was not checkpointed since
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

    def attach(self, connection: Connection, earlier: Moment | None = None) -> None:
        """Record what this connection commits from now on, unless another process records already.
        `earlier` is a commit that it has made before."""
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            lock = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return
            self._lock = lock
            self._number = self._next()
            if (self._is_lazy or self._numbers("base")) and self._stamp() == self._kept_stamp():
                self._continue()
            else:
                self._begin(connection)
            if earlier is not None:
                self._record(earlier.bookmark.offset, earlier.at_s)
            self._note(connection, self._written_s())
            if not self._is_lazy or min(self._numbers("times"), default=self._number) < self._number:
                self._forget()
        except OSError as error:
            self._give_up(connection, error)

    @property
    def is_recording(self) -> bool:
        return self._lock is not None

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
        self.end(connection)
        self.release()

    def release(self) -> None:
        """Close the file, which drops the locks of a connection that is still open."""
        if self._source is not None:
            os.close(self._source)
            self._source = None

    def end(self, connection: Connection) -> None:
        """Stop recording. A lazy archive leaves a short WAL for the next process."""
        if self._lock is None:
            return
        try:
            self._note(connection)
            self._write_unwritten()
            if not self._is_lazy or self._last.offset >= REST_BYTES:
                self._keep(connection)
        except OSError as error:
            self._give_up(connection, error)
        else:
            os.close(self._lock)
            self._lock = None

    def restart_at(self, number: int, connection: Connection) -> None:
        """Archive the WAL and continue with a higher number.
        The file as it is now becomes its base. Raises OSError."""
        self._note(connection)
        self._keep(connection)
        if self._last.offset:
            raise BlockingIOError("another process reads the file")
        if number > self._number:
            self._keep_own_base()
            self._number = number
            self._be_own_base(self._now_s())

    def at(self, at_s: float) -> Moment:
        self._write_unwritten()
        return super().at(at_s)

    def _base_of(self, bookmark: Bookmark) -> int:
        if self._is_own_base and bookmark.number == self._number:
            return self._number
        return super()._base_of(bookmark)

    def _copy_base_to(self, number: int, target: Path) -> None:
        if self._is_own_base and number == self._number:
            self._copy_file(target)
        else:
            super()._copy_base_to(number, target)

    def _continue(self) -> None:
        """Continue after the last process that recorded, which left the file as it is now."""
        bases = self._numbers("base")
        self._is_own_base = self._number not in bases and not self._file(self._number - 1, "wal").exists()
        kept = [number for number in self._numbers("wal") if number >= max(bases, default=0)]
        self._since_base = sum(self._file(number, "wal").stat().st_size for number in kept)

    def _note(self, connection: Connection, at_s: float | None = None) -> None:
        """Record the last commit, if it is new, as of a time; by default, now."""
        last = _last_commit(self._wal, self._last)
        if self._last.offset and last.salt != self._last.salt:  # another program has checkpointed the file
            self._begin(connection)
            last = _last_commit(self._wal, self._last)
        if last.offset != self._last.offset:
            self._last = last
            self._record(last.offset, self._now_s() if at_s is None else at_s)

    def _written_s(self) -> float:
        """Return when the WAL was written last: when the process that died before had its last commit."""
        try:
            return min(self._now_s(), self._wal.stat().st_mtime)
        except FileNotFoundError:
            return self._now_s()

    def _record(self, offset: int, at_s: float) -> None:
        """Record when a commit was made.

        A lazy archive writes it with the first commit of a later second. If the process is killed before, the WAL's own time is used.
        """
        if not self._is_lazy:
            self._write_time(offset, at_s)
            return
        if self._unwritten is not None and int(self._unwritten.at_s) != int(at_s):
            self._write_unwritten()
        self._unwritten = Moment(at_s, Bookmark(self._number, offset))

    def _write_unwritten(self) -> None:
        if self._unwritten is not None:
            moment, self._unwritten = self._unwritten, None
            self._write_time(moment.bookmark.offset, moment.at_s)

    def _write_time(self, offset: int, now_s: float) -> None:
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
        self._write_unwritten()
        if not self._last.offset:
            return
        self._keep_own_base()
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
        """Start with a new base, because another program changed the file. Raises OSError."""
        self._write_unwritten()
        if not self._is_lazy and not self._checkpoint(connection):
            raise BlockingIOError("another process reads the file")
        self._number, self._last = self._next() + 1, Commit(0, b"")
        if self._is_lazy:
            self._be_own_base(min(self._now_s(), self.path.stat().st_mtime))
        else:
            self._copy_base()

    def _be_own_base(self, since_s: float) -> None:
        """Use the file, which has been the same since a time, as the base. Raises OSError.
        Nothing is synced: if it is lost, the next process makes a new base."""
        self._file(self._number, "times").write_bytes(TIMES.pack(since_s, 0))
        (self.folder / "stamp").write_bytes(json.dumps(self._stamp()).encode())
        self._is_own_base, self._since_base = True, 0

    def _keep_own_base(self) -> None:
        """Copy the file, if it is its own base, before it is changed by a checkpoint. Raises OSError."""
        if self._is_own_base:
            self._copy_file(self._file(self._number, "base"))
            self._is_own_base = False

    def _copy_base(self) -> None:
        """Copy the file as a new base. Raises OSError."""
        self._copy_file(self._file(self._number, "base"))
        self._file(self._number, "times").write_bytes(TIMES.pack(self._now_s(), 0))
        self._since_base = 0

    def _copy_file(self, target: Path) -> None:
        before = self._stamp()
        if self._source is None:
            self._source = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        _copy(self._source, target, before[0])
        if self._stamp() != before:
            raise BlockingIOError("another program writes the file")

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
        self._unwritten = None
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


def delete_histories(state_dir: Path) -> None:
    """Delete the histories of a site's D1 databases and Durable Objects.

    Those that another process is writing stay."""
    for kind in ("d1", "durable_object"):
        for folder in list((state_dir / "bindings" / kind).rglob("*.history")):
            with suppress(OSError), alone_in(folder):
                shutil.rmtree(folder)


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
