"""`pilotlight backup` and `restore`: copy the state of a running router and its sites, and restore it.

Each database is read by SQLite's backup API in one read transaction: the copy is consistent and has every write that was acknowledged before it
started. Histories of Durable Objects are neither copied nor changed. Other files are read before the databases, and files that are new by then are
read afterwards. So usage on its way from a file to the ledger is in the copy at least once; the ledger recognizes duplicates by the request's id. A
bucket's newest objects are opened while its index is locked, so that each object in the index is in the copy. Functions' secrets and their key are
read while no process can replace the key.
"""

import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.operations.snapshots import FORMAT, BackupFolder, SavedFile, Snapshot
from pilotlight.runtime.cli.operations.state_roots import StateRoot, check_owner
from pilotlight.support import atomic_files
from pilotlight.support.directory_locks import alone_in

MAGIC = b"SQLite format 3\0"
R2_INDEX = "index.sqlite"  # this index names files in its folder
CODE = "deployed"  # folder of a site's state with the files of deployed functions
SIDE_FILES = ("-wal", "-shm", "-journal")
BUSY_S = 30.0
MOST_TRIES = 5
MAX_OPEN_OBJECTS = 500  # maximum number of objects that are open at once; a process may open 1,024 files by default


def backup(folder: Path, roots: Sequence[StateRoot], keep: int | None) -> str:
    """Make a snapshot; return a sentence about it. Raises CliError.

    `keep` is the number of newest snapshots to keep; None keeps all."""
    there = [root for root in roots if root.path.is_dir()]
    if not there:
        raise CliError(f"there is no state at {', '.join(str(root.path) for root in roots)}: nothing to back up.")
    for root in there:
        check_owner(root.path)
        if folder.absolute().is_relative_to(root.path):
            raise CliError(f"{folder} is inside {root.path}, which is backed up: choose another folder.")
    backups = BackupFolder(folder)
    backups.make()
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another backup to {folder} is under way.") from None
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            saved = {root.name: tuple(_saved(backups, root)) for root in there}
            name = backups.write(Snapshot(FORMAT, created, version("pilotlight-inference"), saved))
        except (OSError, sqlite3.Error) as error:
            raise CliError(f"the backup was not made: {error}.") from None
        if keep is not None:
            backups.forget_all_but(keep)
    num_files = sum(map(len, saved.values()))
    size = sum(file.size for files in saved.values() for file in files)
    return f"{name}: {', '.join(saved)}; {num_files} files of {_mib(size)}, {_mib(backups.num_written)} of them new."


def restore(folder: Path, roots: Sequence[StateRoot], name: str | None) -> str:
    """Restore a snapshot's files; return a sentence about them.

    Raises CliError, before anything is written, if a root is in use or not empty, or if the snapshot has none of the roots or lacks chunks.
    A root that is not in the snapshot is left as it is.
    """
    backups = BackupFolder(folder)
    snapshot = backups.read(name)
    wanted = [root for root in roots if root.name in snapshot.roots]
    if not wanted:
        raise CliError(
            f"the snapshot has {', '.join(snapshot.roots)}, but this machine's files name {', '.join(root.name for root in roots)}."
        )
    with ExitStack() as stack:
        for root in wanted:
            _lock(root.path, stack)
            found = next((each for each in root.path.iterdir() if each.name not in root.left_out), None)
            if found is not None:
                raise CliError(f"{root.path} is not empty ({found.name}): move it away, so that nothing is mixed.")
        backups.check_all_there([file for root in wanted for file in snapshot.roots[root.name]])
        for root in wanted:
            try:
                for file in snapshot.roots[root.name]:
                    _restore_file(backups, root.path, file)
                atomic_files.sync_all(root.path)
            except OSError as error:
                raise CliError(f"{root.path} is incomplete, remove it and restore again: {error}.") from None
    left = [each for each in snapshot.roots if each not in {root.name for root in wanted}]
    more = f" Not restored, because no file names them: {', '.join(left)}." if left else ""
    return f"Restored {', '.join(root.name for root in wanted)} as of {snapshot.created}.{more}"


def _restore_file(backups: BackupFolder, root: Path, file: SavedFile) -> None:
    path = root / file.path
    if not path.resolve().is_relative_to(root.resolve()):
        raise CliError(f"the snapshot names {file.path}, which leads out of {root}.")
    _make_folders(root, path)
    with open(path, "xb") as opened:
        os.fchmod(opened.fileno(), file.mode)
        for data in backups.content(file):
            opened.write(data)


def _make_folders(root: Path, path: Path) -> None:
    """Make the folders between a root and a file.

    Isolates, whose user may be another, read functions' code; all else is private.
    """
    *between, _ = path.relative_to(root).parts
    is_code = between[:1] == [CODE]
    if is_code:
        root.chmod(root.stat().st_mode | 0o011)
    for folder in accumulate(between, Path.joinpath, initial=root):
        folder.mkdir(exist_ok=True, mode=0o700)
        if is_code and folder != root:
            folder.chmod(0o755)


def _saved(backups: BackupFolder, root: StateRoot) -> list[SavedFile]:
    """Store a root's files and return their entries. Raises OSError, sqlite3.Error, CliError."""
    plain: dict[Path, SavedFile] = {}
    _save_plain(backups, root, plain)
    databases = []
    for path in _files(root):
        if path.name == R2_INDEX and path.parent.parent.name == "r2" and _is_database(root, path):
            databases.append(_save_bucket(backups, root, path, plain))
        elif _is_database(root, path):
            with closing(_viewed(path)) as view:
                databases.append(_save_database(backups, root, path, view))
    secrets = SecretStore(root.path)
    with secrets.unchanged():
        for path in [path for path in plain if path.parent == secrets.directory]:
            del plain[path]  # read again: the key may have been replaced
        _save_plain(backups, root, plain)
    return sorted([*plain.values(), *databases], key=lambda file: file.path)


def _save_plain(backups: BackupFolder, root: StateRoot, saved: dict[Path, SavedFile]) -> None:
    """Store the files that are not databases and not stored yet.

    A file that disappears meanwhile is skipped.
    """
    for path in _files(root):
        if path in saved or _is_database(root, path):
            continue
        with suppress(FileNotFoundError), open(path, "rb") as file:
            saved[path] = _save_file(backups, root, path, file)


def _save_file(backups: BackupFolder, root: StateRoot, path: Path, file: BinaryIO) -> SavedFile:
    status = os.fstat(file.fileno())
    size, chunks = backups.add(file)
    return SavedFile(path.relative_to(root.path).as_posix(), status.st_mode & 0o777, size, chunks)


def _save_bucket(backups: BackupFolder, root: StateRoot, index: Path, plain: dict[Path, SavedFile]) -> SavedFile:
    """Store a bucket's index and the objects that it names. Raises OSError, sqlite3.Error, CliError.

    An object's file is deleted only after the transaction that removes it from the index. So the files that are not stored yet are opened while the
    index is locked, and a read view of the index starts then too. Both are read after the lock is released.
    """
    for _ in range(MOST_TRIES):
        with closing(_opened(index)) as view, ExitStack() as stack:
            with closing(_opened(index)) as holder:
                holder.execute("BEGIN IMMEDIATE")
                view.execute("BEGIN")
                new = [path for path in _objects(view, index) if path not in plain]
                if len(new) <= MAX_OPEN_OBJECTS:
                    opened = {path: stack.enter_context(_opened_object(index, path)) for path in new}
            if len(new) <= MAX_OPEN_OBJECTS:
                plain.update({path: _save_file(backups, root, path, file) for path, file in opened.items()})
                return _save_database(backups, root, index, view)
        _save_plain(backups, root, plain)
    raise CliError(f"objects in {root.path} are written faster than they can be read: try again later.")


def _objects(connection: sqlite3.Connection, index: Path) -> list[Path]:
    rows = connection.execute("SELECT version FROM objects UNION SELECT version FROM parts")
    return [index.parent / "files" / version[:2] / version for (version,) in rows]


def _opened_object(index: Path, path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise CliError(f"{index} names {path}, which is not there: delete the object, or restore the file.") from None


def _save_database(backups: BackupFolder, root: StateRoot, path: Path, view: sqlite3.Connection) -> SavedFile:
    mode = path.stat().st_mode & 0o777
    with tempfile.NamedTemporaryFile(dir=backups.directory, prefix=".database-") as copy:
        with closing(sqlite3.connect(copy.name, isolation_level=None)) as target:
            target.execute("PRAGMA synchronous = OFF")
            view.backup(target)
        with open(copy.name, "rb") as file:
            size, chunks = backups.add(file)
    return SavedFile(path.relative_to(root.path).as_posix(), mode, size, chunks)


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)


def _viewed(path: Path) -> sqlite3.Connection:
    """Open a database for reading.

    Its log (WAL) may be a part of its history. SQLite deletes a log with the last connection, unless that one is read-only. Without a log a read-only
    connection would leave an empty one.
    """
    wal = Path(f"{path}-wal")
    mode = "ro" if wal.exists() and wal.stat().st_size else "rw"
    return sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None)


def _files(root: StateRoot) -> Iterator[Path]:
    for directory, folders, names in os.walk(root.path):
        here = Path(directory)
        if here == root.path:
            folders[:] = [name for name in folders if name not in root.left_out]
        if here.is_relative_to(root.path / "bindings" / "durable_object"):
            folders[:] = [name for name in folders if not name.endswith(".history")]
        for name in names:
            path = here / name
            is_side_file = any(
                name.endswith(end) and _is_database(root, here / name.removesuffix(end)) for end in SIDE_FILES
            )
            if not is_side_file and not path.is_symlink() and path.is_file():
                yield path


def _is_database(root: StateRoot, path: Path) -> bool:
    """Tell whether a file is a database of ours.
    Of functions' folders and of objects of buckets, which may be databases of others, every byte counts."""
    parts = path.relative_to(root.path).parts
    if parts[0] == CODE or (parts[:2] == ("bindings", "r2") and parts[3:4] == ("files",)):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _lock(path: Path, stack: ExitStack) -> None:
    """Lock a directory until the stack is closed, so that no server uses it. Raises CliError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CliError(f"{path} cannot be created: {error.strerror}.") from None
    check_owner(path)
    try:
        stack.enter_context(alone_in(path))
    except BlockingIOError:
        raise CliError(f"a site serves from {path}: stop it first.") from None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
