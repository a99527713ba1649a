"""Bundles as files that several processes share: opened, mapped, and written atomically.

A bundle is written under a temporary name, with a lock held on it, and renamed when it is whole, so a kill at any moment leaves a whole bundle or
none. An unfinished file without a lock has a dead writer. This module knows files and locks, and is independent of what the tensors contain.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pilotlight.engine.api.plain_files import open_descriptor
from pilotlight.engine.weights.bundles.bundle import (
    Bundle,
    WeightBundleError,
    encode_header,
    encode_seal,
    read_bundle,
)
from pilotlight.kernels.cpu import durable, pages
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE
from pilotlight.support.disk_errors import is_disk_full

log = logging.getLogger(__name__)

_PARTIAL = ".partial"


class BundleFile:
    """An open bundle; a context manager.

    Memory returned by `map` remains valid after the file is closed or removed.
    """

    def __init__(self, path: Path, fd: int, bundle: Bundle) -> None:
        self.path = path
        self.bundle = bundle
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> "BundleFile":
        """Open a bundle. Raises FileNotFoundError, or WeightBundleError for a file that is not a whole bundle."""
        fd = open_descriptor(path)
        try:
            return cls(path, fd, read_bundle(fd))
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> "BundleFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def map(self, for_device: bool = False) -> torch.Tensor:
        """Map the whole file, and return its bytes, which must not be written to. Raises OSError.

        `for_device`: map it writable, because a device's driver accepts no read-only memory.
        """
        if not for_device:
            return pages.map_file(self.fd, self.bundle.size)
        # Open the same file again, although another file may be at its path now.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return pages.map_file(fd, self.bundle.size, is_writable=True)
        finally:
            os.close(fd)


class BundleWriter:
    """A bundle being written.

    It uses writes instead of a map: on a full file system a write returns an error where a map would raise SIGBUS, and no page is zeroed before it is
    written (1 GiB in 0.4 s, instead of 0.8 s through a map).
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.memory = torch.empty(size, dtype=torch.uint8, device="meta")  # layouts need no bytes, only places
        self._mapped: torch.Tensor | None = None
        self._huge_end: int | None = 0  # end of the huge pages so far; None once the system has no more of them

    @property
    def is_linked(self) -> bool:
        """False if another process has removed the unfinished file, which then never becomes a bundle."""
        return os.fstat(self._fd).st_nlink > 0

    def write(self, start: int, content: memoryview) -> None:
        """Write bytes at offset `start`. Thread-safe."""
        while content:
            count = os.pwrite(self._fd, content, start)
            content, start = content[count:], start + count

    def write_huge(self, start: int, content: memoryview) -> None:
        """Write bytes at offset `start`, into huge pages as long as the system has any.

        Calls must be in ascending order of offsets. A GiB takes 0.2 to 0.5 s, and 0.6 to 3 s if small pages are made huge afterwards.
        """
        end = start + len(content)
        while self._huge_end is not None and self._huge_end < end:
            self.write(max(self._huge_end, start), memoryview(b"\0"))  # an unwritten page cannot be made huge
            is_huge = pages.make_huge(self.map(), self._huge_end, HUGE_PAGE)
            self._huge_end = self._huge_end + HUGE_PAGE if is_huge else None
        self.write(start, content)

    def map(self) -> torch.Tensor:
        """Map the file, including parts not written yet; the caller must not write to the map."""
        if self._mapped is None:
            self._mapped = pages.map_file(self._fd, self.memory.nbytes)
        return self._mapped


@contextmanager
def new_bundle(path: Path, bundle: Bundle) -> Iterator[BundleWriter]:
    """Yield a writer for the tensors of a new bundle.

    The bundle is at `path` once the block has ended without an exception. Raises WeightBundleError if there is no room for the bundle, and OSError if
    the file system refuses.
    """
    remove_partial(path)
    if free_bytes(path.parent) < bundle.size:
        raise _no_room(path.parent, bundle.size)
    partial, fd = _create(path)
    try:
        os.ftruncate(fd, bundle.size)
        writer = BundleWriter(fd, bundle.size)
        header = encode_header(bundle)
        writer.write(0, memoryview(header))
        seal = encode_seal(header)
        writer.write(bundle.size - len(seal), memoryview(seal))
        yield writer
        durable.replace(partial, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        if is_disk_full(error):
            raise _no_room(path.parent, bundle.size) from error
        raise
    finally:
        os.close(fd)


def remove_partial(path: Path) -> None:
    """Remove unfinished files of the bundle at `path` whose writers are dead."""
    for partial, is_locked in _partials(path):
        if not is_locked:
            with suppress(OSError):
                os.unlink(partial)
                log.info("removed a bundle that its writer did not finish: %s", partial)


def is_being_written(path: Path) -> bool:
    """True if a live process, perhaps this one, is writing the bundle at `path`."""
    return any(is_locked for _, is_locked in _partials(path))


def _partials(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the unfinished files of the bundle at `path`, each with whether its writer is alive.

    The file of a dead writer stays locked until the caller requests the next file.
    """
    for partial in path.parent.glob(f"{path.name}.*{_PARTIAL}"):
        try:
            fd = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # the file has just been finished or removed
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = False
        except OSError:
            is_locked = True
        try:
            yield partial, is_locked
        finally:
            os.close(fd)


def _create(path: Path) -> tuple[Path, int]:
    while True:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(
            fd
        ).st_nlink:  # otherwise another process removed the file before it was locked, and took its writer for dead
            return partial, fd
        os.close(fd)


def _no_room(directory: Path, num_bytes: int) -> WeightBundleError:
    free = free_bytes(directory)
    return WeightBundleError(
        f"the weights take {num_bytes / 2**20:.1f} MiB and {directory} has {free / 2**20:.1f} MiB free: give it more room, "
        "or let fewer models stay in host memory"
    )


def free_bytes(directory: Path) -> int:
    state = os.statvfs(directory)
    return state.f_bavail * state.f_frsize
