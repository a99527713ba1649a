"""Memory on a CPU that is read at full speed: huge pages where the system gives them, given back to it when the tensor is gone.

With pages of 4 KiB two cores read 40 GB/s, with pages of 2 MiB 50 (measured on Zen 5): the prefetchers stop at a page's end. A map per tensor also
keeps short-lived buffers of a load from leaving holes between weights, half of a load's memory otherwise.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty's, on a huge page's boundary when it fills one; zeros until it is written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: small pages do
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes].view(dtype).view(tuple(shape))


def prefer_huge(memory: torch.Tensor) -> None:
    """Ask for huge pages under memory that was allocated without them and has hardly been touched: a KV cache, whose blocks lie anywhere."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if memory.is_cpu and num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # A refusal changes nothing but the speed, so it is not looked at.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)
