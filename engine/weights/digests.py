"""The identity of a checkpoint's bytes: a fingerprint for caches, and digests for later loads.

Keys and values may be reused only with exactly the weights that computed them. The fingerprint covers config.json, and of every weights file its
name, size, modification time, header and a sample of its data. It takes tens of milliseconds, while a full digest would take as long as loading. The
modification time reveals edits between the samples. A file that was merely copied again gets another fingerprint, which costs a cold cache.

Most files come without a digest, so the first load records the checksums of their bytes, and later loads are compared with them. A file that was
modified in place is checked before it is loaded; an unmodified one is checked in the background. Different bytes are damage, and the checkpoint is
refused. A file that replaced another by a rename is taken as a new one, which is logged. This module knows files, and is independent of tensors.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import open_file, read_bytes
from pilotlight.engine.weights.checkpoint import weight_files
from pilotlight.kernels.cpu import durable
from pilotlight.kernels.cpu.build import BuildError, private_cache, private_folder

log = logging.getLogger(__name__)

# Environment variable: a folder of digests instead of the one in the user's cache, or 0 to keep none.
SWITCH = "PILOTLIGHT_DIGESTS"

_FIRST_AFTER_S = 5.0  # delay of the check, so that other work of a load comes first
_STEP_BYTES = 4 << 20
_SHARE = 0.25  # largest share of a core's time
_SAMPLES = 16  # number of samples of each file, evenly spread
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 1 << 20  # enough to identify a header of a hundred thousand tensors


def folder() -> Path | None:
    """Return the directory of the records of first loads, or None if they are not kept."""
    own = os.environ.get(SWITCH)
    if own == "0":
        return None
    try:
        return private_folder(Path(own)) if own else private_cache("digests")
    except BuildError:
        return None


def fingerprint(directory: Path) -> bytes:
    """Return 32 bytes that identify a checkpoint's weights. Raises OSError if a file cannot be read."""
    return _of_directory(directory, is_dated=True)


def content_fingerprint(directory: Path) -> bytes:
    """Return a fingerprint without modification times, which differ between copies. Raises OSError."""
    return _of_directory(directory, is_dated=False)


def _of_directory(directory: Path, is_dated: bool) -> bytes:
    digest = blake2b(digest_size=32)
    digest.update(blake2b(read_bytes(directory / "config.json")).digest())
    for file in weight_files(directory):
        digest.update(_of_file(file, is_dated))
    return digest.digest()


def _of_file(file: Path, is_dated: bool) -> bytes:
    digest = blake2b(digest_size=32)
    with open_file(file) as content:
        state = os.fstat(fd := content.fileno())
        digest.update(repr((file.name, state.st_size, state.st_mtime_ns if is_dated else 0)).encode())
        header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
        digest.update(os.pread(fd, min(header_bytes, _MAX_HEADER_BYTES), 8))
        for i in range(_SAMPLES):
            digest.update(os.pread(fd, _SAMPLE_BYTES, max(0, state.st_size * (i + 1) // _SAMPLES - _SAMPLE_BYTES)))
    return digest.digest()


class _Found(NamedTuple):
    """The state of a file when it was last checked."""

    size: int
    written_at: int  # modification time in ns
    checksum: int
    inode: int
    is_damaged: bool = False

    def is_of(self, status: os.stat_result) -> bool:
        return (self.size, self.written_at, self.inode) == (status.st_size, status.st_mtime_ns, status.st_ino)


def check_sound(directory: Path, folder: Path) -> None:
    """Raise CheckpointError if a file is known to be damaged, or other bytes were written to it in place.

    `folder` contains the records of first loads.
    """
    record = _record_of(directory, folder)
    for name, found in _read(record).items():
        file = directory / name
        if not file.exists():
            continue
        status = file.stat()
        is_damaged = found.is_of(status) and found.is_damaged
        if not found.is_of(status) and found.inode == status.st_ino:  # the file was modified in place
            is_damaged = _checksum(file, lambda _: None) != found.checksum
        if is_damaged:
            raise CheckpointError(
                f"{file} is damaged: its bytes are not those of its first load; fetch the checkpoint again. If you changed it, "
                f"replace it by a rename, or remove {record}"
            )


def verify(directory: Path, folder: Path, pause: Callable[[float], None] = time.sleep) -> bool:
    """Compare files with the record of their first load, or make the record; return False for damage.

    The log names the damaged file. Raises OSError.
    """
    path = _record_of(directory, folder)
    before, now = _read(path), {}
    for file in weight_files(directory):
        known, status = before.get(file.name), file.stat()
        found = _Found(status.st_size, status.st_mtime_ns, _checksum(file, pause), status.st_ino)
        if not found.is_of(file.stat()):
            return True  # the file is being written now: its next load checks again
        if known is not None and known.checksum != found.checksum:
            if known.is_of(status) or known.inode == status.st_ino:
                found = found._replace(checksum=known.checksum, is_damaged=True)
                log.error("%s is damaged: its bytes are not those of its first load; fetch the checkpoint again", file)
            else:
                log.warning("%s was replaced since its last load, and holds other bytes", file)
        now[file.name] = found
    if now != before:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({name: list(found) for name, found in now.items()}))
        durable.replace(partial, path)
    return not any(found.is_damaged for found in now.values())


def verify_in_background(
    directory: Path, folder: Path, on_damage: Callable[[], None], first_after_s: float = _FIRST_AFTER_S
) -> None:
    """Verify in a thread, once per process for each state of the files; call `on_damage` if it fails."""
    key = (directory, *((file.name, file.stat().st_mtime_ns) for file in weight_files(directory)))
    if key in _started:
        return
    _started.add(key)

    def run() -> None:
        time.sleep(first_after_s)
        try:
            if not verify(directory, folder):
                on_damage()
        except OSError as error:
            log.warning("%s cannot be compared with its first load: %s", directory, error)

    threading.Thread(target=run, name="digests", daemon=True).start()


_started: set[tuple[object, ...]] = set()


def _checksum(file: Path, pause: Callable[[float], None]) -> int:
    checksum = 0
    with file.open("rb", buffering=0) as content:
        while True:
            began = time.thread_time()
            if not (step := content.read(_STEP_BYTES)):
                return checksum
            checksum = crc32(step, checksum)
            pause((time.thread_time() - began) * (1 / _SHARE - 1))


def _record_of(directory: Path, folder: Path) -> Path:
    return folder / f"{sha256(str(directory.resolve()).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, _Found]:
    try:
        return {name: _Found(*found) for name, found in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # no record, or an incomplete one
        return {}
