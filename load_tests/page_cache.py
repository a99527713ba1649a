"""Remove files from the page cache, and measure their cached share.

A cold start needs them removed; the kernel may keep them, so the result must be checked.
"""

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop(files: list[Path]) -> float:
    """Ask the kernel to drop the files from its cache; return the share that is still cached."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return cached_share(files)


def warm(files: list[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def cached_share(files: list[Path]) -> float:
    """Return the share of their bytes that is cached, 0 to 1."""
    pages = resident = 0
    for file in files:
        size = file.stat().st_size
        if size:
            of_file, there = _resident(file, size)
            pages, resident = pages + of_file, resident + there
    return resident / pages if pages else 0.0


def _resident(file: Path, size: int) -> tuple[int, int]:
    count = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * count)()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), vector)
        error = ctypes.get_errno()
        del anchor
    if failed:
        raise OSError(error, os.strerror(error), str(file))
    return count, sum(entry & 1 for entry in bytes(vector))
