"""The files of bootstrap programs, kept in the user's cache between starts of their models.

Knows names, sizes and ages of files; does not know their contents (program.py). A program makes a process read and write at addresses: like
executable code, it is only trusted in a folder to which no one else can write.
"""

import logging
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pilotlight.kernels.cpu import durable
from pilotlight.kernels.cpu.build import BuildError, find_library, private_cache, private_folder

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30  # of all of them: the least recently used are removed first
MOST_OWN_BYTES = 256 << 20  # of a program's weights that are in no other file

_SUFFIX = ".bootstrap"


SWITCH = "PILOTLIGHT_BOOTSTRAP"  # 0: nothing is written or read there; or the folder of programs


def are_wanted() -> bool:
    return os.environ.get(SWITCH) != "0"


def library() -> Path | None:
    """Return the installed C library, or None if no program can run."""
    try:
        return find_library() if are_wanted() else None
    except BuildError:
        return None


def path_of(fingerprint: str, dtype: str, library: Path) -> Path:
    """Return the path of a program. Raises BuildError if there is no such folder.

    `dtype`: as in the site's file.
    """
    name = sha256(f"{fingerprint} {dtype} {library.stem}".encode()).hexdigest()[:32]
    return _folder() / f"{name}{_SUFFIX}"


def _folder() -> Path:
    own = os.environ.get(SWITCH)
    return private_folder(Path(own)) if own else private_cache("bootstrap")


def discard() -> None:
    """Remove all programs. Raises BuildError and OSError if there is no such folder."""
    for path in _folder().glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)
        log.warning("removed %s; it will be made again", path)


def digests() -> Path | None:
    """Return the folder of checkpoints' digests (engine/weights/digests.py), or None."""
    try:
        return private_folder(_folder() / "digests") if are_wanted() else None
    except BuildError:
        return None


def has_programs() -> bool:
    try:
        return are_wanted() and any(_folder().glob(f"*{_SUFFIX}"))
    except BuildError:
        return False


def note_use(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def write(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all. Raises OSError, or any error of `content`."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            for part in content:
                file.write(part)
        durable.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _make_room(path)


def _make_room(newest: Path) -> None:
    """Remove the least recently used programs, and files that killed writers have left."""
    found = []
    for file in newest.parent.iterdir():
        with suppress(OSError):
            status = file.stat()
            if file.suffix == _SUFFIX and not file.name.startswith("."):
                found.append((file == newest, status.st_mtime, status.st_size, file))
            elif status.st_mtime < newest.stat().st_mtime - _ABANDONED_S:
                file.unlink()
    left = MOST_BYTES
    for _, _, size, file in sorted(found, reverse=True):
        left -= size
        if left < 0:
            file.unlink(missing_ok=True)


_ABANDONED_S = 600.0
