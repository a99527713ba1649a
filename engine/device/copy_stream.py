"""A CUDA stream for copies of cache blocks and weights, which run beside computation.

Copies are started inside `copying`, and run after a mark. This module knows addresses and their order, and is independent of their contents.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime


class CudaCopyStream:
    def __init__(
        self, device: torch.device, cuda: Any = torch.cuda, runtime_of: Callable[[torch.device], Any] = CudaRuntime
    ) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._device: torch.device = self._stream.device  # with an index, which `device` may lack
        self._runtime = runtime_of(self._device)

    def mark(self) -> object:
        """Return a point in the device's work, after everything that this thread has launched."""
        return self._event(self._cuda.current_stream(self._device))

    def wait_for(self, mark: object) -> None:
        """Let later copies wait for a mark."""
        assert isinstance(mark, self._cuda.Event)
        # sets this thread's device: otherwise its copies would create a context on the first device
        self._cuda.set_device(self._device)
        self._stream.wait_event(mark)

    def begin_copy(self, into: int, source: int, num_bytes: int) -> None:
        """Start a copy between the device and memory that it can access; copies run in order."""
        self._runtime.begin_copy(into, source, num_bytes, self._stream.cuda_stream)

    def started(self) -> torch.cuda.Event:
        """Return an event for all copies started so far."""
        return self._event(self._stream)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can access: [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = self._cuda.Event()
        event.record(stream)
        return event


@contextmanager
def copying(stream: CudaCopyStream, mark: object) -> Iterator[None]:
    """Let copies that are started in this context wait for the mark; wait for the copies at its end.

    The wait also follows an error, because the memory may be reused afterwards.
    """
    stream.wait_for(mark)
    try:
        yield
    finally:
        stream.started().synchronize()
