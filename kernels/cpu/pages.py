"""Memory on a CPU that is read at full speed: huge pages where the system gives them, given back to it when the tensor is gone.

With pages of 4 KiB two cores read 40 GB/s, with pages of 2 MiB 50 (measured on Zen 5): the prefetchers stop at a page's end. A map per allocation
also keeps short-lived buffers of a load from leaving holes between weights, half of a load's memory otherwise. A file's pages can be huge too, if
it lies in memory and is mapped where a huge page may begin.
"""

import contextlib
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache

import torch

from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE, MappedFile, MappedParts, libc

_MADV_COLLAPSE = 25  # of Linux, all architectures of torch's


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as torch.empty does, on a huge page's boundary if it fills one; zeros until it is written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    return _anonymous(num_bytes).view(dtype).view(tuple(shape))


def prefer_huge(memory: torch.Tensor) -> None:
    """Ask for huge pages under memory that was allocated without them and has hardly been touched: a KV cache, whose blocks lie anywhere."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if memory.is_cpu and num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # A refusal changes only the speed, and is ignored.
        libc().madvise(start, num_bytes, mmap.MADV_HUGEPAGE)


def small(num_bytes: int) -> torch.Tensor:
    """Bytes under which `make_huge` will put huge pages once they are written; under a system that cannot, they are huge from the beginning."""
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    return _anonymous(num_bytes, is_huge=not can_make_huge())


def map_file(fd: int, num_bytes: int, is_writable: bool = False) -> torch.Tensor:
    """The file's bytes in place, shared with everybody who has it mapped. Writing to them ends the process, unless `is_writable`."""
    assert 0 < num_bytes <= os.fstat(fd).st_size
    if not sys.platform.startswith("linux"):
        return torch.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return tensor_of(MappedFile(fd, num_bytes, is_writable))


def tensor_of(mapped: MappedFile | MappedParts) -> torch.Tensor:
    """Return its bytes, mapped as long as there is a tensor of them."""
    return torch.frombuffer(mapped.memory, dtype=torch.uint8)[mapped.start : mapped.start + mapped.num_bytes]


def make_huge(memory: torch.Tensor, start: int, num_bytes: int) -> bool:
    """Move a part of what `small` or `map_file` returned into huge pages. The part begins and ends on their boundaries or with the memory. False:
    there are none to be had."""
    end = min(start + num_bytes, memory.nbytes // HUGE_PAGE * HUGE_PAGE)
    assert memory.data_ptr() % HUGE_PAGE == start % HUGE_PAGE == 0
    return end <= start or bool(libc().madvise(memory.data_ptr() + start, end - start, _MADV_COLLAPSE) == 0)


@cache
def can_make_huge() -> bool:
    """True if pages can be made huge once they are written, as Linux can since 6.1."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    trial = _anonymous(HUGE_PAGE, is_huge=False)
    trial[0] = 1
    return make_huge(trial, 0, HUGE_PAGE)


def _anonymous(num_bytes: int, is_huge: bool = True) -> torch.Tensor:
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_huge:
        with contextlib.suppress(OSError):  # a kernel without them: small pages do
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]
