"""Write files and folders so that they are complete under their name, even after a power failure.

Without a sync, a rename may reach the disk before the written data, and the file would lack its end.
"""

import os
import tempfile
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file, which is replaced completely or not at all. Raises OSError.

    By default only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
        replace(Path(made), path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def replace(made: Path, path: Path) -> None:
    """Move `made`, a closed file or a folder of closed files, to `path` and sync it. Raises OSError."""
    sync_all(made)
    made.replace(path)
    sync(path.parent)


def sync_all(path: Path) -> None:
    """Sync a file, or a folder with everything in it, to the disk."""
    for each in (*path.rglob("*"), path):
        if not each.is_symlink():
            sync(each)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def let_others_read(folder: Path) -> None:
    """Let other users read a folder and everything in it, whatever this process's umask is."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def stamp(file: Path) -> object:
    """Return a value that changes when the file is written, replaced, created or removed."""
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
