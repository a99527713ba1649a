"""Copies blocks between a device's KV cache and host memory.

On a CPU a block is copied by one memmove. On CUDA the copy engines work in parallel to the computation: directly from and to memory that is
registered with the device, and through pinned staging buffers for other memory. The copiers are thread-safe, and independent of what a block
contains.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol, TypeVar

import torch

from pilotlight.engine.device.copy_stream import CudaCopyStream, copying
from pilotlight.engine.device.registered_memory import RegisteredMemory

T = TypeVar("T")
R = TypeVar("R")


NUM_MOVERS = 4  # number of threads that copy within host memory, some 8 GB/s each; a bus reaches 50 GB/s
_BUFFER_BYTES = 8 << 20


class BlockMove(NamedTuple):
    """The device and host addresses of a block, or of a run of blocks that are neighbours on both."""

    device: int
    host: int
    num_bytes: int


class BlockStaging:
    """Two pinned buffers for blocks between a CUDA device and host memory that it cannot access.

    Threads move bytes between that memory and one buffer while the device copies the other.
    """

    def __init__(self, block_bytes: int, stream: CudaCopyStream, movers: ThreadPoolExecutor, buffer_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._stream = stream
        self._movers = movers
        self._num_rows = max(1, buffer_bytes // block_bytes)
        self._buffers = [stream.allocate(self._num_rows * block_bytes) for _ in range(2)]

    def store(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks from device to host; return when the copy is complete."""
        waiting: list[tuple[torch.cuda.Event, list[tuple[int, int]]]] = []
        for part in self._parts(moves):
            for row, move in part:
                self._stream.begin_copy(row, move.device, self._block_bytes)
            waiting.append((self._stream.started(), [(move.host, row) for row, move in part]))
            if len(waiting) == 2:  # both buffers are in use: empty the older one while the device fills the other
                self._empty(*waiting.pop(0))
        for filled, moved in waiting:
            self._empty(filled, moved)

    def fetch(self, moves: Sequence[BlockMove]) -> None:
        """Start to copy from host to device; return when the host memory has been read."""
        copied: list[torch.cuda.Event] = []
        for i, part in enumerate(self._parts(moves)):
            if i >= 2:
                copied[i - 2].synchronize()
            self._move([(row, move.host) for row, move in part])
            for row, move in part:
                self._stream.begin_copy(move.device, row, self._block_bytes)
            copied.append(self._stream.started())

    def _parts(self, moves: Sequence[BlockMove]) -> Iterator[list[tuple[int, BlockMove]]]:
        """Yield batches that fit into a buffer, of (address in the buffer, move); the two buffers alternate."""
        for i, start in enumerate(range(0, len(moves), self._num_rows)):
            address = self._buffers[i % 2].data_ptr()
            part = moves[start : start + self._num_rows]
            yield [(address + row * self._block_bytes, move) for row, move in enumerate(part)]

    def _empty(self, filled: torch.cuda.Event, moves: Sequence[tuple[int, int]]) -> None:
        filled.synchronize()
        self._move(moves)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (into, source) in host memory with several threads; ctypes releases Python's lock."""
        parts = [moves[i::NUM_MOVERS] for i in range(min(NUM_MOVERS, len(moves)))]
        for _ in self._movers.map(self._move_part, parts):
            pass

    def _move_part(self, moves: Sequence[tuple[int, int]]) -> None:
        for into, source in moves:
            ctypes.memmove(into, source, self._block_bytes)


class BlockCopier(Protocol):
    store_bytes: int  # batch size of stores, which bounds the wait of an overwrite or a following fetch
    fetch_bytes: int  # batch size of fetches, which bounds the wait of an abort

    def mark(self) -> object:
        """Return a mark of all device work launched so far; a copy with this mark waits for that work.

        Called by the thread that launches the work.
        """

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        """Copy blocks from device to host; return when the copy is complete."""

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        """Copy blocks from host to device; return when the copy is complete."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Call a function on each item; on CUDA in several threads, because the CPU then computes no steps."""


def make_copier(blocks: torch.Tensor, registered: RegisteredMemory | None = None) -> BlockCopier:
    """Return the copier of a cache's blocks, [num_blocks, block_bytes] uint8.

    `registered`: host memory that a CUDA device can access directly.
    """
    assert blocks.is_contiguous()
    if blocks.device.type == "cuda":
        return CudaBlockCopier(blocks, registered, CudaCopyStream(blocks.device))
    return CpuBlockCopier(blocks)


class CpuBlockCopier:
    """A copier by ctypes.memmove, which releases Python's lock; torch's copy would start more threads."""

    store_bytes = fetch_bytes = 4 << 20  # takes a millisecond to copy

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks  # keeps the memory at `_start` alive
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
    store_bytes = 16 << 20  # takes 0.4 ms on a bus of 47 GB/s, 1.6 ms with checksums, 2.8 ms into slots without pages
    fetch_bytes = 64 << 20  # takes 1.4 ms, or 5 ms through staging; batches of 4 MiB would only reach 38 GB/s

    def __init__(
        self,
        blocks: torch.Tensor,
        registered: RegisteredMemory | None,
        stream: CudaCopyStream,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._blocks = blocks  # keeps the memory at `_start` alive
        self._start = blocks.data_ptr()
        self._block_bytes = blocks.shape[1]
        self._registered = registered
        self._stream = stream
        self._movers = ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="kv-bytes")
        self._staging = BlockStaging(self._block_bytes, stream, self._movers, buffer_bytes)
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
        with self._turn(mark):  # the mark matters, because running steps may still read the old content of these blocks
            staged: list[BlockMove] = []
            for run in self._runs(blocks, source, staged):
                self._stream.begin_copy(run.device, run.host, run.num_bytes)
            self._staging.fetch(staged)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return list(self._movers.map(function, items))  # complete, because the items may change afterwards

    @contextmanager
    def _turn(self, mark: object) -> Iterator[None]:
        """Open a context whose copies start after the mark's work; wait for them at its end.

        Registered memory stays registered meanwhile.
        """
        in_use = nullcontext() if self._registered is None else self._registered.in_use()
        with self._lock, in_use, copying(self._stream, mark):
            yield

    def _runs(self, blocks: Sequence[int], views: Sequence[memoryview], staged: list[BlockMove]) -> Iterator[BlockMove]:
        """Yield the moves to or from memory that the device can access; add the others to `staged`.

        Merges neighbours, because each copy call takes 2 to 9 us.
        """
        size = self._block_bytes
        device, host, length = 0, 0, 0  # the current run
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
