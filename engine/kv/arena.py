"""One allocation for the KV caches of all models of a host, cut into slabs that models borrow.

Knows bytes and gaps; refuses to know blocks and shapes. Memory that is borrowed holds zeros: attention masks what lies beyond a context, and a
NaN left there by an earlier borrower would survive the mask (0 * NaN).
"""

import mmap
from threading import Lock
from typing import NamedTuple

import torch

ALIGNMENT = mmap.PAGESIZE  # so that a slab of a CPU's arena is whole pages, which can be handed back


class Slab(NamedTuple):
    start: int
    memory: torch.Tensor  # [bytes] uint8


class ArenaFullError(Exception):
    """No gap is large enough."""


class Arena:
    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self.device = device
        self._pages = _anonymous_pages(total_bytes) if device.type == "cpu" and total_bytes else None
        if self._pages is not None:
            self._memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            self._memory = torch.zeros(total_bytes, dtype=torch.uint8, device=device)
        self._gaps = [(0, total_bytes)] if total_bytes else []  # (start, end), ordered, never touching
        self._lock = Lock()  # models are loaded in one thread and unloaded in another

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._gaps)

    @property
    def largest_gap_bytes(self) -> int:
        return max((end - start for start, end in self._gaps), default=0)

    def borrow(self, num_bytes: int) -> Slab:
        """The first gap that fits."""
        with self._lock:
            for i, (start, end) in enumerate(self._gaps):
                if end - start >= num_bytes:
                    rest = (min(start + _aligned(num_bytes), end), end)
                    self._gaps[i : i + 1] = [rest] if rest[0] < end else []
                    return Slab(start, self._memory[start : start + num_bytes])
        raise ArenaFullError(f"{num_bytes} bytes wanted, the largest gap has {self.largest_gap_bytes}")

    def give_back(self, slab: Slab) -> None:
        """The borrower must have stopped using the memory; the next one finds zeros."""
        size = slab.memory.numel()
        self._clear(slab)
        with self._lock:
            gaps = sorted([*self._gaps, (slab.start, min(slab.start + _aligned(size), self._memory.numel()))])
            merged: list[tuple[int, int]] = []
            for start, end in gaps:
                assert not merged or merged[-1][1] <= start, "a slab was given back twice"
                if merged and merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((start, end))
            self._gaps = merged

    def _clear(self, slab: Slab) -> None:
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Linux takes the pages of a private map back and gives out zeros when they are next touched: a sleeping model costs no memory.
            self._pages.madvise(mmap.MADV_DONTNEED, slab.start, slab.memory.numel())
        else:
            slab.memory.zero_()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _anonymous_pages(num_bytes: int) -> mmap.mmap:
    """Zeros that cost memory only once they are written; torch.zeros writes them all (256 MiB resident per idle host)."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)
