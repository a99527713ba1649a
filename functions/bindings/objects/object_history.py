"""Point-in-time recovery of one Durable Object: bookmarks and restorations.

The history begins with the first commit and is in a folder beside the object's file. An object that is only read has none. A closed file keeps a
short write-ahead log (WAL), which is the newest part of the history.
"""

import fcntl
import logging
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from pilotlight.functions.bindings.storage.wal_archive import REST_BYTES, Bookmark, HistoryError, Moment, WalArchive
from pilotlight.support import atomic_files
from pilotlight.support.database import Connection

log = logging.getLogger("pilotlight.bindings")

# A restoration gets a number this far ahead, so that its undo bookmark is known before the segments until then are.
RESERVED = 1 << 12
NOT_RECORDED = "the history is not recorded: its disk is full, or another process has the object"
BOOKMARK = re.compile(r"([0-9a-f]{8,12})-([0-9a-f]{8,12})-([0-9a-f]{16})")
SQLITE_LOCKS = (512, 0x40000000)  # length and start of the bytes of a file that SQLite locks


class Restoration(msgspec.Struct, frozen=True):
    """An order to restore a bookmark. The restored content is the first commit with a reserved number."""

    bookmark: str
    number: int


class ObjectHistory:
    def __init__(self, path: Path, kept_s: float, now_s: Callable[[], float]) -> None:
        self._path = path
        self._now_s = now_s
        self._archive = WalArchive(path, kept_s, now_s, is_lazy=True)
        self._is_attached = False
        self._first: Moment | None = None  # the last commit of the first second, until the archive is attached
        self._folder = self._archive.folder
        self._restoration = self._folder / "restoration"

    def committed(self, connection: Connection) -> None:
        """Record the last commit.
        Commits of the first second are recorded later, so that their callers wait for no new file."""
        if not self._is_attached:
            now_s = self._now_s()
            with suppress(OSError):
                offset = self._archive.last_offset()
                if offset < REST_BYTES and (self._first is None or int(self._first.at_s) == int(now_s)):
                    self._first = Moment(now_s, Bookmark(0, offset))
                    return
        self._record(connection)

    def current(self, connection: Connection) -> str:
        """Return the bookmark of the last commit. Raises HistoryError."""
        return self._text(self._now(connection))

    def at(self, at_s: float, connection: Connection) -> str:
        """Return the bookmark of the last commit at or before a time. Raises HistoryError."""
        self._now(connection)
        if at_s > self._now_s():
            raise HistoryError("the time is in the future")
        return self._text(self._archive.at(at_s).bookmark)

    def restore_next(self, text: str, connection: Connection) -> str:
        """Order `restore` to restore a bookmark; return the bookmark that undoes it.
        Raises HistoryError, OSError."""
        now = self._now(connection)
        self._archive.check(self._parse(text, now))
        number = now.number + RESERVED
        atomic_files.write(self._restoration, msgspec.json.encode(Restoration(text, number)))
        return self._text(Bookmark(number, 0))

    @property
    def has_restoration(self) -> bool:
        return self._restoration.exists()

    def restore(self, connection: Connection) -> bool:
        """Restore what `restore_next` ordered, in one commit; return whether it was possible.
        A process that is killed meanwhile leaves the old content and the order. Raises OSError, sqlite3.Error."""
        built = self._folder / "restored"
        self._is_attached = self._archive.is_recording  # tries again, if the history could not be written
        self._record(connection)
        if not self._archive.is_recording:
            raise OSError(NOT_RECORDED)
        try:
            order = msgspec.json.decode(self._restoration.read_bytes(), type=Restoration)
            bookmark = self._parse(order.bookmark, self._now(connection))
            _remove(built)
            self._archive.build(bookmark, built)
            self._archive.restart_at(order.number, connection)
            with closing(sqlite3.connect(built)) as source:
                source.backup(connection)
        except (HistoryError, msgspec.DecodeError) as error:
            log.error("%s: it was not restored: %s", self._path, error)
            self.forget_restoration()
            return False
        finally:
            _remove(built)
        self._archive.committed(connection)
        return True

    def forget_restoration(self) -> None:
        self._restoration.unlink(missing_ok=True)

    def delete(self, connection: Connection) -> None:
        """Delete the history; the next commit begins another one, to which earlier bookmarks do not belong."""
        self._archive.end(connection)
        with suppress(sqlite3.OperationalError):  # another process reads: the WAL is checkpointed later
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._is_attached, self._first = False, None

    def close(self, connection: Connection) -> None:
        """Close the object's connection. If there is a history, the WAL stays."""
        if self._first is not None:
            self._record(connection)
        self._archive.end(connection)
        if self._folder.is_dir() and _size(Path(f"{self._path}-wal")):
            _close_without_checkpoint(connection, self._path)
            self._archive.release()
            _remove_shared_memory(self._path)
        else:
            connection.close()
            self._archive.release()

    def _record(self, connection: Connection) -> None:
        if self._is_attached:
            self._archive.committed(connection)
        else:
            self._is_attached = True
            self._archive.attach(connection, self._first)
            self._first = None

    def _now(self, connection: Connection) -> Bookmark:
        """Return the position of the last commit. Raises HistoryError."""
        self._record(connection)
        if not self._archive.is_recording:
            raise HistoryError(NOT_RECORDED)
        return self._archive.now()

    def _text(self, bookmark: Bookmark) -> str:
        return f"{bookmark}-{self._id()}"

    def _parse(self, text: str, now: Bookmark) -> Bookmark:
        found = BOOKMARK.fullmatch(text)
        if found is None:
            raise HistoryError(f"{text[:100]!r} is not a bookmark of a Durable Object")
        bookmark = Bookmark(int(found[1], 16), int(found[2], 16))
        if found[3] != self._id():
            raise HistoryError("the bookmark belongs to another object, or to content before deleteAll")
        if bookmark > now:
            raise HistoryError("the bookmark is later than the object's last write")
        return bookmark

    def _id(self) -> str:
        """Return the random name of this history, which its bookmarks end with."""
        path = self._folder / "id"
        with suppress(FileNotFoundError):
            if re.fullmatch("[0-9a-f]{16}", id := path.read_text()):
                return id
        id = secrets.token_hex(8)
        atomic_files.write(path, id.encode())
        return id


def _close_without_checkpoint(connection: Connection, path: Path) -> None:
    """Close a file's only connection and leave its WAL.

    SQLite checkpoints when the last connection is closed, unless that one is read-only.
    """
    with ExitStack() as stack:
        with suppress(sqlite3.Error):  # then it is checkpointed, and the next commit begins a new base
            last = stack.enter_context(closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)))
            last.execute("SELECT 1 FROM sqlite_master").fetchone()  # opens the WAL
        connection.close()


def _remove_shared_memory(path: Path) -> None:
    """Delete the index of the WAL of a closed file, 32 KiB, unless another process has the file open."""
    with suppress(OSError), open(path, "rb+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *SQLITE_LOCKS)
        Path(f"{path}-shm").unlink(missing_ok=True)


def _remove(database: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{database}{end}").unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
