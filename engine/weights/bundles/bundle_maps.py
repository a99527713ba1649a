"""Maps of bundles, kept while their models sleep, so that a woken model finds its weights in place.

On a CPU a woken model computes on the map, whose page table entries still exist. For a GPU the map is registered with the device, whose copy engines
then read it as fast as the bus allows (measured on an H100: 50 GB/s, or 15 GB/s through buffers). Besides the file's memory, a map takes addresses
and page tables, which have a five-hundredth of the file's size if pages are small. A map also keeps the memory of a file that its site has removed,
so `BundleMaps.drop_removed_maps` must be called often. This module knows files and devices, and is independent of what the tensors contain.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pilotlight.engine.device.copy_stream import CudaCopyStream, copying
from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.weights.bundles.bundle_file import BundleFile

log = logging.getLogger(__name__)

_MOST_MAPS = 16  # number of the most recently used maps that are kept
# Limit of copies in flight. A call that finds the driver's queue full waits without releasing the interpreter's lock, so that other threads wait,
# too.
MOST_COPIES = 256


class _Map(NamedTuple):
    path: Path
    memory: torch.Tensor
    registered: RegisteredMemory | None = None

    def close(self) -> None:
        if self.registered is not None:
            self.registered.close()


class BundleMaps:
    """The kept maps of a process."""

    def __init__(
        self,
        make_registered: Callable[[torch.Tensor, torch.device], RegisteredMemory] = RegisteredMemory,
        make_stream: Callable[[torch.device], CudaCopyStream] = CudaCopyStream,
    ) -> None:
        self._make_registered = make_registered
        self._make_stream = make_stream
        self._lock = threading.Lock()
        # by device and inode number, which no other file gets while the file is mapped
        self._maps: dict[tuple[int, int], _Map] = {}

    def map_cached(self, file: BundleFile) -> torch.Tensor:
        """Return the kept map of the file, or map the file and keep the map."""
        with self._lock:
            cached = self._maps.pop(_number(os.fstat(file.fd)), None)
        memory = cached.memory if cached is not None and _is_whole(cached, file) else file.map()
        self.cache_map(file.path, memory)
        return memory

    def cache_map(self, path: Path, memory: torch.Tensor) -> None:
        """Keep a map of the file that is at `path` now."""
        self._keep(_Map(path, memory))

    def register(self, file: BundleFile, device: torch.device) -> None:
        """Map the file and register the map with a device, in the background, unless a map is kept already.

        If that fails, later loads read the file without it.
        """
        with self._lock:
            is_there = _number(os.fstat(file.fd)) in self._maps
        if is_there:
            return
        try:
            memory = file.map(for_device=True)
        except OSError as error:
            log.info("%s is not registered with %s: %s", file.path, device, error)
            return
        registered = self._make_registered(memory, device)
        registered.start()
        self._keep(_Map(file.path, memory, registered))

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until all kept maps are registered with their devices; return False on a timeout or a failure."""
        with self._lock:
            found = [one.registered for one in self._maps.values() if one.registered is not None]
        return all([registered.wait(timeout_s) for registered in found])

    def copy_registered(
        self,
        file: BundleFile,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        most_copies: int = MOST_COPIES,
    ) -> bool:
        """Copy the file's tensors to the device and wait for the copies.

        Returns False, without copying, if the file is not registered as a whole.
        """
        number = _number(os.fstat(file.fd))
        with self._lock:
            cached = self._maps.get(number)
            if cached is None or cached.registered is None or not _is_whole(cached, file):
                return False
            if not cached.registered.covers(0, cached.memory.nbytes):
                return False
            self._maps[number] = self._maps.pop(number)  # make it the most recently used
        stream = self._make_stream(device)
        with copying(stream, stream.mark()):
            for i, (into, source, num_bytes) in enumerate(_copies(file, tensors, cached.memory, cached.registered)):
                if i % most_copies == most_copies - 1:
                    stream.started().synchronize()
                stream.begin_copy(into, source, num_bytes)
        return True

    def drop_removed_maps(self) -> None:
        """Drop the maps of files that were removed. A model that computes on such a map keeps its memory."""
        with self._lock:
            gone = [number for number, one in self._maps.items() if not _is_at(one.path, number)]
            dropped = [self._maps.pop(number) for number in gone]
        for one in dropped:
            one.close()

    def _keep(self, one: _Map) -> None:
        try:
            number = _number(one.path.stat())
        except OSError:  # the file has been removed meanwhile
            one.close()
            return
        with self._lock:
            before = self._maps.pop(number, None)
            self._maps[number] = one
            dropped = [self._maps.pop(next(iter(self._maps))) for _ in range(len(self._maps) - _MOST_MAPS)]
        for other in (*dropped, before):
            if other is not None:
                other.close()


MAPS = BundleMaps()


def _copies(
    file: BundleFile, tensors: Mapping[str, torch.Tensor], memory: torch.Tensor, registered: RegisteredMemory
) -> Iterator[tuple[int, int, int]]:
    """Yield (destination address, source address, number of bytes) of each contiguous piece to copy."""
    for placed in file.bundle.tensors:
        if (into := tensors.get(placed.spec.name)) is not None:
            assert into.is_contiguous()
            assert into.nbytes == placed.end - placed.start
            for start, end in registered.split(placed.start, placed.end):
                yield into.data_ptr() + start - placed.start, memory.data_ptr() + start, end - start


def _is_whole(cached: _Map, file: BundleFile) -> bool:
    return cached.memory.nbytes == file.bundle.size <= os.fstat(file.fd).st_size


def _is_at(path: Path, number: tuple[int, int]) -> bool:
    try:
        return _number(path.stat()) == number
    except OSError:
        return False


def _number(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
