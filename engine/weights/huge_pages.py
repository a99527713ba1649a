"""Puts huge pages under weights when the model is already serving.

Products of a few rows read weights a third faster from huge pages (60 GB/s instead of 44 on two cores), but a system that has to find huge pages
first takes longer to fill them: seconds per GiB in a virtual machine whose free memory belongs to its host, where small ones take 0.4 s. So weights
are read into small pages, and moved. Knows memory and pauses; refuses to know models.
"""

import logging
import threading
import time

import torch

from kernels.cpu import pages
from kernels.cpu.mapped_file import HUGE_PAGE

log = logging.getLogger(__name__)

_STEP_BYTES = 32 << 20  # under way at once
_SHARE = 0.25  # of a core's time, at most
_FIRST_AFTER_S = 0.5  # the request that woke the model comes first


class HugePages:
    """A thread that ends by itself when all of `memory` has been moved, or with `close`."""

    def __init__(self, memory: torch.Tensor, first_after_s: float = _FIRST_AFTER_S, share: float = _SHARE) -> None:
        self.moved_bytes = 0
        self._memory = memory
        self._share = share
        self._closing = threading.Event()
        # No daemon: it holds a tensor, and one that is let go while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, args=(first_after_s,), name="huge-pages")
        self._thread.start()

    @classmethod
    def start(cls, memory: torch.Tensor | None) -> "HugePages | None":
        """None: there is nothing to move, or the system cannot."""
        return cls(memory) if memory is not None and memory.nbytes >= HUGE_PAGE and pages.can_make_huge() else None

    def close(self) -> None:
        """Nobody waits for the step under way: its memory goes when it ends."""
        self._closing.set()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, pause_s: float) -> None:
        for start in range(0, self._memory.nbytes, _STEP_BYTES):
            if self._closing.wait(pause_s) or not threading.main_thread().is_alive():
                return
            began = time.monotonic()
            if not pages.make_huge(self._memory, start, _STEP_BYTES):
                log.info("the system has no more huge pages to give: weights stay in small ones")
                return
            self.moved_bytes = min(start + _STEP_BYTES, self._memory.nbytes)
            pause_s = (time.monotonic() - began) * (1 / self._share - 1)
