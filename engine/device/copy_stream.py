"""A stream of a CUDA device, whose copy engines move bytes during computation: cache blocks, weights.

Copies are started inside `copying`, after a mark. Knows addresses and their order; does not know their contents.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device: torch.device = self._stream.device  # with its number, which `device` may lack
        self._runtime = CudaRuntime(self._device)

    def mark(self) -> object:
        """Return a point in the device's work, after everything that this thread has launched."""
        return self._event(torch.cuda.current_stream(self._device))

    def wait_for(self, mark: object) -> None:
        """Let later copies wait for a mark."""
        assert isinstance(mark, torch.cuda.Event)
        # for this thread, whose copies would otherwise create a context on the first device
        torch.cuda.set_device(self._device)
        self._stream.wait_event(mark)

    def begin_copy(self, into: int, source: int, num_bytes: int) -> None:
        """Copy between the device and memory that it can access; copies run in sequence."""
        self._runtime.begin_copy(into, source, num_bytes, self._stream.cuda_stream)

    def started(self) -> torch.cuda.Event:
        """Return an event for all copies started so far."""
        return self._event(self._stream)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can access: [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


@contextmanager
def copying(stream: CudaCopyStream, mark: object) -> Iterator[None]:
    """Let copies that are started inside wait for the mark, and wait for them at the end.

    That is so after an error, too, because their memory may then be reused.
    """
    stream.wait_for(mark)
    try:
        yield
    finally:
        stream.started().synchronize()
