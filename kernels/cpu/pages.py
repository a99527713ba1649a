"""Memory on a CPU that is read at full speed: huge pages where the system gives them, given back to it when the tensor is gone.

With pages of 4 KiB two cores read 40 GB/s, with pages of 2 MiB 50 (measured on Zen 5): the prefetchers stop at a page's end. A map per allocation
also keeps short-lived buffers of a load from leaving holes between weights, half of a load's memory otherwise. A file's pages can be huge too, if
it lies in memory and is mapped where a huge page may begin.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

HUGE_PAGE = 2 << 20
# Numbers of Linux, all architectures of torch's.
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty's, on a huge page's boundary when it fills one; zeros until it is written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    return _anonymous(num_bytes).view(dtype).view(tuple(shape))


def prefer_huge(memory: torch.Tensor) -> None:
    """Ask for huge pages under memory that was allocated without them and has hardly been touched: a KV cache, whose blocks lie anywhere."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if memory.is_cpu and num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # A refusal changes nothing but the speed, so it is not looked at.
        _libc().madvise(start, num_bytes, mmap.MADV_HUGEPAGE)


def map_file(fd: int, num_bytes: int, *, writable: bool) -> torch.Tensor:
    """The file's bytes in place, shared with everybody who has it mapped; where it is not `writable`, writing ends the process."""
    assert 0 < num_bytes <= os.fstat(fd).st_size
    if not sys.platform.startswith("linux"):
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(fd, num_bytes, access=access), dtype=torch.uint8)
    # Over memory that nobody else can have: its owner unmaps it, and what lies over it, when the tensor is gone.
    memory = _anonymous(num_bytes)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    at = _libc().mmap(memory.data_ptr(), num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if at != memory.data_ptr():
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {num_bytes} bytes: {os.strerror(error)}")
    return memory


def make_huge(fd: int, memory: torch.Tensor) -> bool:
    """Put huge pages under a file in memory, all of which `memory` maps; before it is filled, since what is there has to be copied. True: all of it
    has memory. False: the system has no huge pages to give, or knows no way; small ones do. Raises OSError where the file system is full."""
    num_bytes = memory.nbytes // HUGE_PAGE * HUGE_PAGE
    if not sys.platform.startswith("linux") or num_bytes == 0:
        return False
    for start in range(0, num_bytes, HUGE_PAGE):  # of a hole no huge page is made
        os.pwrite(fd, os.pread(fd, 1, start), start)
    # One call for all: each waits until every core has looked up from its work.
    if _libc().madvise(memory.data_ptr(), num_bytes, _MADV_COLLAPSE) != 0:
        return False
    if memory.nbytes > num_bytes:
        os.posix_fallocate(fd, num_bytes, memory.nbytes - num_bytes)
    return True


def _anonymous(num_bytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: small pages do
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    integer = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer]
    return libc
