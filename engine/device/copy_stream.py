"""A stream of a CUDA device, whose copy engines move bytes beside the computation: blocks of the cache, weights that wake.

Copies are begun inside `copying`, behind a mark. Knows addresses and their order; refuses to know what lies there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime


class BegunCopies(Protocol):
    def synchronize(self) -> object: ...


class CopyStream(Protocol):
    def mark(self) -> object:
        """Return a point in the device's work, behind all that this thread has launched."""

    def wait_for(self, mark: object) -> None:
        """Let copies that are begun from now on wait for a mark."""

    def begin_copy(self, into: int, source: int, num_bytes: int) -> None:
        """Copy between the device and memory that it reaches, one copy behind the other."""

    def begun(self) -> BegunCopies:
        """Return what waits for all copies that have been begun."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the host that the device reaches: [num_bytes] uint8."""


@contextmanager
def copying(stream: CopyStream, mark: object) -> Iterator[None]:
    """Have copies that are begun inside wait for the mark. None is under way when the context ends, by an error either: their memory may go to
    somebody else then."""
    stream.wait_for(mark)
    try:
        yield
    finally:
        stream.begun().synchronize()


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device: torch.device = self._stream.device  # with its number, which `device` may lack
        self._runtime = CudaRuntime(self._device)

    def mark(self) -> object:
        return self._event(torch.cuda.current_stream(self._device))

    def wait_for(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.set_device(self._device)  # of this thread, whose copies would else make a context on the first one
        self._stream.wait_event(mark)

    def begin_copy(self, into: int, source: int, num_bytes: int) -> None:
        self._runtime.begin_copy(into, source, num_bytes, self._stream.cuda_stream)

    def begun(self) -> BegunCopies:
        return self._event(self._stream)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
