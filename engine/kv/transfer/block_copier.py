"""Moves blocks between a device's KV cache and host memory.

On a CPU a block is moved by one memmove. On CUDA the copy engines do it beside the computation, straight from and to memory that is registered
with the device; what is not goes through pinned staging. Knows addresses; refuses to know what a block holds. Safe to use from several threads.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch

from pilotlight.engine.device.copy_stream import CopyStream, CudaCopyStream, copying
from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.kv.transfer.block_staging import NUM_MOVERS, BlockMove, BlockStaging

T = TypeVar("T")
R = TypeVar("R")


class BlockCopier(Protocol):
    store_bytes: int  # at once: what an overwriting, or a fetch that comes next, may have to wait for
    fetch_bytes: int  # at once: what an abort may have to wait for

    def mark(self) -> object:
        """Return a point in the device's work: what was launched before it has to be done before blocks are copied. From the
        thread that launches."""

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        """Copy from device to host; returns when the bytes are there."""

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        """Copy from host to device; returns when the bytes are there."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Call a function that looks at blocks in host memory, by as many threads as the device leaves it."""


def make_copier(blocks: torch.Tensor, registered: RegisteredMemory | None = None) -> BlockCopier:
    """Return the copier of a cache's blocks, [num_blocks, block_bytes] uint8. `registered`: memory of the host that a CUDA device reaches."""
    assert blocks.is_contiguous()
    if blocks.device.type == "cuda":
        return CudaBlockCopier(blocks, registered, CudaCopyStream(blocks.device))
    return CpuBlockCopier(blocks)


class CpuBlockCopier:
    """ctypes lets go of the interpreter during a memmove; torch's copy would start a team of threads beside the model's."""

    store_bytes = fetch_bytes = 4 << 20  # a millisecond

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks  # kept alive with its address
        self._start = blocks.data_ptr()
        self._block_bytes = blocks.shape[1]

    def mark(self) -> object:
        return None

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        for block, view in zip(blocks, into, strict=True):
            ctypes.memmove(_address(view), self._start + block * self._block_bytes, self._block_bytes)

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        for block, view in zip(blocks, source, strict=True):
            ctypes.memmove(self._start + block * self._block_bytes, _address(view), self._block_bytes)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return map(function, items)


class CudaBlockCopier:
    store_bytes = 16 << 20  # on a bus of 47 GB/s 0.4 ms, 1.6 of checksums, and 2.8 in slots that had no pages
    fetch_bytes = 64 << 20  # 1.4 ms, and 5 through staging; 4 MiB at once would come at 38 GB/s

    def __init__(self, blocks: torch.Tensor, registered: RegisteredMemory | None, stream: CopyStream) -> None:
        self._blocks = blocks  # kept alive with its address
        self._start = blocks.data_ptr()
        self._block_bytes = blocks.shape[1]
        self._registered = registered
        self._stream = stream
        self._movers = ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="kv-bytes")
        self._staging = BlockStaging(self._block_bytes, stream, self._movers)
        self._lock = threading.Lock()

    def mark(self) -> object:
        return self._stream.mark()

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        with self._turn(mark):
            staged: list[BlockMove] = []
            for run in self._runs(blocks, into, staged):
                self._stream.begin_copy(run.host, run.device, run.num_bytes)
            self._staging.store(staged)

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        with self._turn(mark):  # steps under way may still read what these blocks held before
            staged: list[BlockMove] = []
            for run in self._runs(blocks, source, staged):
                self._stream.begin_copy(run.device, run.host, run.num_bytes)
            self._staging.fetch(staged)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return list(self._movers.map(function, items))  # all of it: what is looked at may change afterwards

    @contextmanager
    def _turn(self, mark: object) -> Iterator[None]:
        """Begin copies behind the mark and wait for them, while what is registered stays so."""
        in_use = nullcontext() if self._registered is None else self._registered.in_use()
        with self._lock, in_use, copying(self._stream, mark):
            yield

    def _runs(self, blocks: Sequence[int], views: Sequence[memoryview], staged: list[BlockMove]) -> Iterator[BlockMove]:
        """Yield the blocks whose place in host memory the device reaches, neighbours on both sides as one move: a call takes 2 to 9 us. Add the
        others to `staged`."""
        size = self._block_bytes
        device, host, length = 0, 0, 0  # of the run
        for block, view in zip(blocks, views, strict=True):
            at, place = self._start + block * size, _address(view)
            if length and (at, place) == (device + length, host + length) and self._reaches(host, length + size):
                length += size
                continue
            if length:
                yield BlockMove(device, host, length)
            device, host, length = at, place, size
            if not self._reaches(place, size):
                staged.append(BlockMove(at, place, size))
                length = 0
        if length:
            yield BlockMove(device, host, length)

    def _reaches(self, address: int, num_bytes: int) -> bool:
        if self._registered is None:
            return False
        start = address - self._registered.address
        return self._registered.covers_at_once(start, start + num_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
