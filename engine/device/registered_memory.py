"""Host memory that a CUDA device can access directly: a mapping, registered piece by piece.

Registering takes a second per 10 GB and runs in a thread: a caller checks which bytes are covered, and copies the other bytes in another way. This
module knows pieces, and is independent of their contents and of how they are copied. Thread-safe. Registrations end with the process.
"""

import logging
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime
from pilotlight.kernels.cpu.mapped_file import libc

log = logging.getLogger(__name__)

# Size of the pieces. While one is registered, every launch and copy waits for the driver: 1.2 ms at most (measured on an H100).
PIECE_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # constant of Linux 5.14 and later, the same on all architectures that torch supports


class RegisteredMemory:
    """Host memory that a thread registers piece by piece.

    Call `start`, check `covers` before each copy, and call `close` at the end. Nothing is covered on a CPU or if registering fails.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        registrar: CudaRuntime | None = None,
    ) -> None:
        """`memory`: [num_bytes] uint8, page-aligned, and mapped writable for this process."""
        assert memory.dtype == torch.uint8
        assert memory.dim() == 1
        assert memory.data_ptr() % mmap.PAGESIZE == piece_bytes % mmap.PAGESIZE == 0, "pieces must begin at pages"
        self.address = memory.data_ptr()
        self.num_bytes = len(memory)
        self._memory: torch.Tensor | None = memory  # a reference, so that it stays mapped until `close`
        self._piece_bytes = piece_bytes
        self._registrar = registrar or _registrar_of(device)
        self._condition = threading.Condition()
        self._wanted: dict[int, None] = {}  # pieces to register, in this order
        self._registering: int | None = None
        self._covered: set[int] = set()
        self._released: set[int] = set()  # pieces to unregister
        self._num_users = 0
        self._may_register = self._registrar is not None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to register all pieces, the first one first."""
        self.register(0, self.num_bytes)

    def register(self, start: int, end: int) -> None:
        """Start to register the pieces that contain these bytes."""
        with self._condition:
            if not self._may_register:
                return
            there = (self._covered | {self._registering}) - self._released
            self._wanted.update((piece, None) for piece in self._pieces(start, end) if piece not in there)
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="register-memory", daemon=True)
                self._thread.start()

    def covers(self, start: int, end: int) -> bool:
        """True if the device can access these bytes. Each copy must stay within a piece (see `split`)."""
        return 0 <= start < end <= self.num_bytes and self._covered.issuperset(self._pieces(start, end))

    def covers_at_once(self, start: int, end: int) -> bool:
        """True if the device can access these bytes with one copy."""
        piece = start // self._piece_bytes
        return piece in self._covered and end <= self._edges(piece)[1]

    def split(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the parts of a range, each within one piece."""
        for piece in self._pieces(start, end):
            first, last = self._edges(piece)
            yield max(start, first), min(end, last)

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is registered; return False on a timeout or a failure."""
        with self._condition:
            self._condition.wait_for(lambda: not self._wanted and self._registering is None, timeout_s)
            return self.covers(0, self.num_bytes)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep covered memory registered during a copy."""
        with self._condition:
            self._num_users += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_users -= 1
                self._condition.notify_all()

    def release(self, start: int, end: int) -> None:
        """Stop covering the pieces that contain these bytes: their pages may change.

        They are unregistered once nothing is in use.
        """
        with self._condition:
            for piece in self._pieces(start, end):
                self._wanted.pop(piece, None)
                if piece in self._covered or piece == self._registering:
                    self._covered.discard(piece)
                    self._released.add(piece)
            self._condition.notify_all()

    def close(self) -> None:
        """Unregister all pieces; no piece may be in use. Nothing is covered afterwards."""
        with self._condition:
            self._may_register, self._is_closing = False, True
            self._wanted.clear()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()  # waits for one piece at most
        registered, self._covered, self._released = self._covered | self._released, set(), set()
        self._unregister(registered)
        self._memory = None

    def _run(self) -> None:
        while self._wait_for_work():
            self._unregister_released()
            self._register_next()

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_closing or (not self._num_users if self._released else self._wanted)
            )
            return not self._is_closing

    def _unregister_released(self) -> None:
        with self._condition:
            released, self._released = self._released, set()
        self._unregister(released)

    def _register_next(self) -> None:
        with self._condition:
            piece = self._registering = next(iter(self._wanted), None)
            if piece is None:
                return
            del self._wanted[piece]
        start, end = self._edges(piece)
        assert self._registrar is not None
        # Create the pages first: registering 64 MiB then takes the driver 2 ms instead of 22. A failure costs only that time.
        libc().madvise(self.address + start, end - start, _MADV_POPULATE_WRITE)
        problem = self._registrar.register(self.address + start, end - start)
        with self._condition:
            self._registering = None
            if problem is not None:
                self._released.discard(piece)
                self._give_up(problem)
            elif piece not in self._released:
                self._covered.add(piece)
            self._condition.notify_all()

    def _give_up(self, problem: str) -> None:
        """Stop registering: an error such as a limit of locked memory would recur for the next piece."""
        log.warning(
            "%.1f of %.1f MiB of host memory cannot be registered with the device: %s; they are copied through staging buffers",
            (self.num_bytes - len(self._covered) * self._piece_bytes) / 2**20, self.num_bytes / 2**20, problem,
        )  # fmt: skip
        self._may_register = False
        self._wanted.clear()

    def _unregister(self, pieces: set[int]) -> None:
        for piece in sorted(pieces):
            start, _ = self._edges(piece)
            assert self._registrar is not None
            problem = self._registrar.unregister(self.address + start)
            if problem is not None:
                log.warning("host memory stays registered until this process ends: %s", problem)

    def _pieces(self, start: int, end: int) -> range:
        return range(start // self._piece_bytes, -(-end // self._piece_bytes))

    def _edges(self, piece: int) -> tuple[int, int]:
        return piece * self._piece_bytes, min((piece + 1) * self._piece_bytes, self.num_bytes)


def _registrar_of(device: torch.device) -> CudaRuntime | None:
    if device.type != "cuda":
        return None
    try:
        return CudaRuntime(device)
    except OSError as error:
        log.warning("no host memory can be registered with %s: %s", device, error)
        return None
