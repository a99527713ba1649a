"""Two pinned buffers for blocks between a CUDA device and host memory that it cannot access.

Threads move bytes between that memory and one buffer while the device copies the other. Knows addresses; does not know what a block contains.
"""

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pilotlight.engine.device.copy_stream import CopyStream, StartedCopies

NUM_MOVERS = 4  # threads: one moves some 8 GB/s within host memory, a bus 50
_BUFFER_BYTES = 8 << 20


class BlockMove(NamedTuple):
    """The two addresses of a block, or of neighbours."""

    device: int
    host: int
    num_bytes: int


class BlockStaging:
    def __init__(self, block_bytes: int, stream: CopyStream, movers: ThreadPoolExecutor) -> None:
        self._block_bytes = block_bytes
        self._stream = stream
        self._movers = movers
        self._num_rows = max(1, _BUFFER_BYTES // block_bytes)
        self._buffers = [stream.allocate(self._num_rows * block_bytes) for _ in range(2)]

    def store(self, moves: Sequence[BlockMove]) -> None:
        """Copy from device to host; return when the bytes are there."""
        waiting: list[tuple[StartedCopies, list[tuple[int, int]]]] = []
        for part in self._parts(moves):
            for row, move in part:
                self._stream.begin_copy(row, move.device, self._block_bytes)
            waiting.append((self._stream.started(), [(move.host, row) for row, move in part]))
            if len(waiting) == 2:  # the device fills one buffer while threads empty the other
                self._empty(*waiting.pop(0))
        for filled, moved in waiting:
            self._empty(filled, moved)

    def fetch(self, moves: Sequence[BlockMove]) -> None:
        """Start to copy from host to device; return when everything is in the buffers."""
        copied: list[StartedCopies] = []
        for i, part in enumerate(self._parts(moves)):
            if i >= 2:
                copied[i - 2].synchronize()
            self._move([(row, move.host) for row, move in part])
            for row, move in part:
                self._stream.begin_copy(move.device, row, self._block_bytes)
            copied.append(self._stream.started())

    def _parts(self, moves: Sequence[BlockMove]) -> Iterator[list[tuple[int, BlockMove]]]:
        """Yield as many moves as a buffer has rows, with the addresses of rows in alternating buffers."""
        for i, start in enumerate(range(0, len(moves), self._num_rows)):
            address = self._buffers[i % 2].data_ptr()
            part = moves[start : start + self._num_rows]
            yield [(address + row * self._block_bytes, move) for row, move in enumerate(part)]

    def _empty(self, filled: StartedCopies, moves: Sequence[tuple[int, int]]) -> None:
        filled.synchronize()
        self._move(moves)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks (into, source) in host memory with several threads: ctypes releases Python's lock."""
        parts = [moves[i::NUM_MOVERS] for i in range(min(NUM_MOVERS, len(moves)))]
        for _ in self._movers.map(self._move_part, parts):
            pass

    def _move_part(self, moves: Sequence[tuple[int, int]]) -> None:
        for into, source in moves:
            ctypes.memmove(into, source, self._block_bytes)
