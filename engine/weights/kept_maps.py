"""Maps of bundles in memory that stay while their models sleep: a model that wakes finds its weights where they were, page table entries included.

A map takes addresses and page tables, a five-hundredth of the file with small pages, and no memory: that is the file's. Of a file that its site has
removed, the map is what keeps its memory, so `drop_removed` must be called often. Knows files; refuses to know what is in them.
"""

import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from engine.weights.bundle_file import BundleFile

_MOST = 16  # the latest


class _Kept(NamedTuple):
    path: Path
    memory: torch.Tensor


_kept: dict[tuple[int, int], _Kept] = {}  # by file: as long as it is mapped, no other has its number
_lock = threading.Lock()


def map_kept(file: BundleFile) -> torch.Tensor:
    """As `file.map()`, in the same place as before."""
    status = os.fstat(file.fd)
    with _lock:
        kept = _kept.pop((status.st_dev, status.st_ino), None)
    is_whole = kept is not None and kept.memory.nbytes == file.bundle.size <= status.st_size
    memory = kept.memory if kept is not None and is_whole else file.map()
    keep(file.path, memory)
    return memory


def keep(path: Path, memory: torch.Tensor) -> None:
    """A map of the file that is at `path` now."""
    try:
        status = path.stat()
    except OSError:  # removed meanwhile
        return
    with _lock:
        _kept[status.st_dev, status.st_ino] = _Kept(path, memory)
        while len(_kept) > _MOST:
            del _kept[next(iter(_kept))]


def drop_removed() -> None:
    """The maps of files that are no longer where they were. Whoever computes on one still has it."""
    with _lock:
        kept = list(_kept.items())
    gone = [number for number, one in kept if not _is_at(one.path, number)]
    with _lock:
        for number in gone:
            _kept.pop(number, None)


def _is_at(path: Path, number: tuple[int, int]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == number
