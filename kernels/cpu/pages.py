"""CPU memory in huge pages, if the system has them, returned to the system when the tensor is freed.

With pages of 4 KiB two cores read 40 GB/s, with pages of 2 MiB 50 (measured on Zen 5): the prefetchers stop at the end of a page. One map per
allocation also keeps short-lived buffers of a load from leaving holes between weights, which otherwise took half of the memory of a load. The pages
of a file can be huge, too, if it is in memory and mapped at the boundary of a huge page.
"""

import contextlib
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache

import torch

from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE, MappedFile, MappedParts, libc

_MADV_COLLAPSE = 25  # Linux's value, which is the same on all architectures that torch supports


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as torch.empty does, aligned to a huge page if it fills one.

    A tensor of at least a huge page is zero until it is written.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    return _anonymous(num_bytes).view(dtype).view(tuple(shape))


def prefer_huge(memory: torch.Tensor) -> None:
    """Request huge pages for memory that was allocated without them and has hardly been touched.

    Used for a KV cache, whose blocks are read in any order.
    """
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if memory.is_cpu and num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # A refusal costs only speed, so it is ignored.
        libc().madvise(start, num_bytes, mmap.MADV_HUGEPAGE)


def small(num_bytes: int) -> torch.Tensor:
    """Return bytes that `make_huge` can move to huge pages once they are written.

    If the system cannot do that, the pages are huge from the start.
    """
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    return _anonymous(num_bytes, is_huge=not can_make_huge())


def map_file(fd: int, num_bytes: int, is_writable: bool = False) -> torch.Tensor:
    """Return the file's bytes in place, shared with every process that maps them.

    Writing to them ends the process, unless `is_writable`.
    """
    assert 0 < num_bytes <= os.fstat(fd).st_size
    if not sys.platform.startswith("linux"):
        return torch.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return tensor_of(MappedFile(fd, num_bytes, is_writable))


def tensor_of(mapped: MappedFile | MappedParts) -> torch.Tensor:
    """Return the mapped bytes as a tensor; the map lives as long as any tensor of it."""
    return torch.frombuffer(mapped.memory, dtype=torch.uint8)[mapped.start : mapped.start + mapped.num_bytes]


def make_huge(memory: torch.Tensor, start: int, num_bytes: int) -> bool:
    """Move part of the memory of `small` or `map_file` into huge pages.

    Return False if none are available. The part must start at a huge page's boundary and end at one or at the end of the memory.
    """
    end = min(start + num_bytes, memory.nbytes // HUGE_PAGE * HUGE_PAGE)
    assert memory.data_ptr() % HUGE_PAGE == start % HUGE_PAGE == 0
    return end <= start or bool(libc().madvise(memory.data_ptr() + start, end - start, _MADV_COLLAPSE) == 0)


def whole_huge_pages(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of whole huge pages that the tensors fill, gaps below a huge page included."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
        if ranges and begin - ranges[-1][1] < HUGE_PAGE:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((begin, end))
    whole = ((-(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE) for begin, end in ranges)
    return [(begin, end) for begin, end in whole if begin < end]


def can_copy_to_huge() -> bool:
    """True if a mapped file's pages can be copied to huge ones (mapped_file.copy_to_huge)."""
    return sys.platform.startswith("linux") and hasattr(mmap, "MADV_HUGEPAGE")


@cache
def can_make_huge() -> bool:
    """True if pages can be made huge after they are written (Linux 6.1 or later)."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    trial = _anonymous(HUGE_PAGE, is_huge=False)
    trial[0] = 1
    return make_huge(trial, 0, HUGE_PAGE)


def _anonymous(num_bytes: int, is_huge: bool = True) -> torch.Tensor:
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_huge:
        with contextlib.suppress(OSError):  # kernels without huge pages refuse; small pages work
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]
