"""One allocation for the KV caches of all models of a host, cut into slabs that models borrow.

Knows bytes and gaps; refuses to know blocks and shapes. Memory that is borrowed holds zeros: attention masks what lies
beyond a context, and a NaN left there by an earlier borrower would survive the mask (0 * NaN).
"""

import mmap
from threading import Lock
from typing import NamedTuple

import torch

ALIGNMENT = 256  # what a device wants of a copy's address


class Slab(NamedTuple):
    start: int
    memory: torch.Tensor  # [bytes] uint8


class ArenaFullError(Exception):
    """No gap is large enough."""


class Arena:
    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self._memory = _zeros(total_bytes, device)
        self._gaps = [(0, total_bytes)] if total_bytes else []  # (start, end), ordered, never touching
        self._lock = Lock()  # models are loaded in one thread and unloaded in another

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._gaps)

    @property
    def largest_gap_bytes(self) -> int:
        return max((end - start for start, end in self._gaps), default=0)

    def borrow(self, num_bytes: int) -> Slab:
        """The first gap that fits."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            for i, (start, end) in enumerate(self._gaps):
                if end - start >= num_bytes:
                    rest = (min(start + size, end), end)
                    self._gaps[i : i + 1] = [rest] if rest[0] < end else []
                    return Slab(start, self._memory[start : start + num_bytes])
        raise ArenaFullError(f"{num_bytes} bytes wanted, the largest gap has {self.largest_gap_bytes}")

    def give_back(self, slab: Slab) -> None:
        slab.memory.zero_()
        size = -(-slab.memory.numel() // ALIGNMENT) * ALIGNMENT
        with self._lock:
            gaps = sorted([*self._gaps, (slab.start, min(slab.start + size, self._memory.numel()))])
            merged: list[tuple[int, int]] = []
            for start, end in gaps:
                assert not merged or merged[-1][1] <= start, "a slab was given back twice"
                if merged and merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((start, end))
            self._gaps = merged


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # An anonymous map costs no memory until a page is written; torch.zeros writes them all (256 MiB resident per idle
    # host).
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
