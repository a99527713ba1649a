"""Memory maps of files, without torch.

This module knows addresses, and is independent of what the files contain. Linux only.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HUGE_PAGE = 2 << 20
_PAGE = mmap.PAGESIZE
# Linux's values, which are the same on all architectures that torch supports
_MAP_FIXED, _MADV_POPULATE_READ, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 22, 1, 2
_FAILED = ctypes.c_void_p(-1).value  # the result of mmap if it fails


class MappedFile:
    """A shared map of a file, aligned to a huge page; unmapped when `memory` is no longer referenced."""

    def __init__(self, fd: int, num_bytes: int, is_writable: bool = False) -> None:
        """Map a file for reading. Raises OSError."""
        # The file is mapped over memory that belongs to this object, so freeing `memory` also unmaps the file.
        self.memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.num_bytes = num_bytes
        self.start = -begin % HUGE_PAGE  # offset of the file's first byte in `memory`
        self.address = begin + self.start
        _map_over(self.address, num_bytes, fd, 0, is_writable)


class OpenRange(NamedTuple):
    """A range of bytes of an open file."""

    fd: int
    start: int
    num_bytes: int

    def pages(self, offset: int) -> tuple[int, int]:
        """Return the start and end of the whole pages that the range fills at `offset` in page-aligned memory."""
        first = -(-offset // _PAGE) * _PAGE
        return first, max(first, (offset + self.num_bytes) // _PAGE * _PAGE)


class MappedParts:
    """Parts of files as one piece of memory, freed like `MappedFile`.

    Most of it is the files' own pages; only the few pages in which two parts meet are copies.
    """

    def __init__(self, parts: Sequence[OpenRange]) -> None:
        """Map `parts`, for which `can_join` holds. Raises OSError."""
        self.start = parts[0].start % _PAGE  # offset of the first part in `memory`
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.memory = mmap.mmap(-1, self.start + self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = begin + self.start
        with memoryview(self.memory) as memory:
            for part, offset in _placed(parts):
                first, last = part.pages(offset)
                if first < last:
                    _map_over(begin + first, last - first, part.fd, part.start + first - offset)
                    _read(part.fd, part.start, memory[offset:first])
                    _read(part.fd, part.start + last - offset, memory[last : offset + part.num_bytes])
                else:
                    _read(part.fd, part.start, memory[offset : offset + part.num_bytes])

    def populate(self) -> None:
        """Create all page table entries at once. A refusal only costs speed, so it is ignored."""
        libc().madvise(self.address - self.start, self.start + self.num_bytes, _MADV_POPULATE_READ)


def map_parts(parts: Iterable[tuple[Path, int, int]]) -> MappedParts:
    """Map parts of files, each given by file, offset and length. Raises OSError."""
    with ExitStack() as files:
        return MappedParts([OpenRange(files.enter_context(opened(file)), *part) for file, *part in parts])


@contextmanager
def opened(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def can_join(starts_and_sizes: Sequence[tuple[int, int]]) -> bool:
    """True if each part has the same offset within a page in its file as in the joined memory."""
    parts = [OpenRange(-1, start, num_bytes) for start, num_bytes in starts_and_sizes]
    return all(part.start % _PAGE == offset % _PAGE for part, offset in _placed(parts))


def _placed(parts: Sequence[OpenRange]) -> Iterator[tuple[OpenRange, int]]:
    """Yield each part with its offset in memory; memory starts at the boundary of a page."""
    offset = parts[0].start % _PAGE
    for part in parts:
        yield part, offset
        offset += part.num_bytes


def _map_over(address: int, num_bytes: int, fd: int, start: int, is_writable: bool = False) -> None:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    at = libc().mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, start)
    if at != address:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {num_bytes} bytes: {os.strerror(error)}")


def copy_to_huge(address: int, num_bytes: int) -> bool:
    """Replace a file's map by private huge pages with the same bytes; other threads may read meanwhile.

    The range must consist of whole huge pages. Return False if the system has no memory for it.
    """
    assert address % HUGE_PAGE == num_bytes % HUGE_PAGE == 0
    flags, system = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, libc()
    begin = system.mmap(None, num_bytes + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if begin == _FAILED:
        return False
    copy = -(-begin // HUGE_PAGE) * HUGE_PAGE
    system.madvise(copy, num_bytes, mmap.MADV_HUGEPAGE)  # a refusal leaves small pages, which work
    ctypes.memmove(copy, address, num_bytes)
    system.mprotect(copy, num_bytes, mmap.PROT_READ)
    # The move appears at once to all threads: a reader that finds no page waits for the end of the call.
    moved = system.mremap(copy, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
    if moved != address:
        system.munmap(begin, num_bytes + HUGE_PAGE)
        return False
    if copy > begin:
        system.munmap(begin, copy - begin)
    system.munmap(copy + num_bytes, begin + HUGE_PAGE - copy)
    return True


def _read(fd: int, start: int, into: memoryview) -> None:
    while into:
        count = os.preadv(fd, [into], start)
        if count == 0:
            raise OSError(errno.EIO, "the file was truncated while it was being mapped")
        into, start = into[count:], start + count


@cache
def libc() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    integer = ctypes.c_int
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long]
    found.madvise.argtypes = found.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.mremap.restype = ctypes.c_void_p
    found.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, integer, ctypes.c_void_p]
    return found
