"""Where bootstrap programs are kept between the lives of their models, in the user's cache, and found again.

Knows names, sizes and ages of files; refuses to know what is in them (program.py). A program makes a process read and write at addresses: as what
is executed, it is only believed from a folder that no one else can write to.
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

MOST_BYTES = 1 << 30  # of all of them: those that were used longest ago go first
MOST_OWN_BYTES = 256 << 20  # of one's weights that lie in no other file

_SUFFIX = ".bootstrap"


SWITCH = "PILOTLIGHT_BOOTSTRAP"  # 0: nothing is left there, nor read; or the folder where programs are kept


def are_wanted() -> bool:
    return os.environ.get(SWITCH) != "0"


def library() -> Path | None:
    """Return the C library that is there already; None: no program can run."""
    try:
        return find_library() if are_wanted() else None
    except BuildError:
        return None


def path_of(fingerprint: str, dtype: str, library: Path) -> Path:
    """Return where a program lies. `dtype`: as the site's file has it. Raises BuildError where there is no such folder."""
    name = sha256(f"{fingerprint} {dtype} {library.stem}".encode()).hexdigest()[:32]
    return _folder() / f"{name}{_SUFFIX}"


def _folder() -> Path:
    own = os.environ.get(SWITCH)
    return private_folder(Path(own)) if own else private_cache("bootstrap")


def discard() -> None:
    """Remove all programs. Raises BuildError and OSError where there is no such folder."""
    for path in _folder().glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)
        log.warning("removed %s; it is made again", path)


def digests() -> Path | None:
    """Return the folder of checkpoints' digests (engine/weights/digests.py); None: there is none."""
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
    """Write a file whole or not at all. Raises OSError, or whatever `content` raises."""
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
    """Remove what was used longest ago, and what killed writers have left."""
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
