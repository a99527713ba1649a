"""Moves a chunk of weights from the buffer of the thread that has read it to its final place.

On a CPU a thread has one buffer, from which the final tensor is made directly. On CUDA a thread has two pinned buffers: while the device copies from
one, the thread reads the next chunk into the other. Before it reads into a buffer, it waits until the last copy from that buffer has ended. This
module knows buffers and marks, and is independent of files.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from pilotlight.engine.device.transfer import Mark

Make = Callable[..., object]  # called with (into, *staged); writes `into`


class Waitable(Protocol):
    def wait(self) -> None: ...


class Copier(Protocol):
    """Copies staged bytes to their device."""

    @property
    def num_buffers(self) -> int:
        """The number of buffers per thread: 2 if the thread may read the next chunk during a copy."""

    def in_thread(self) -> AbstractContextManager[object]:
        """Return a context in which each thread does its work."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a buffer on the host: [num_bytes] uint8."""

    def begin(self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Make) -> Waitable | None:
        """Call make(into, *staged), perhaps asynchronously.

        Returns the event after which `staged` may be overwritten; None if that is allowed at once.
        """


class Staging:
    """A thread's buffers. Call `next`, fill the buffer, `send` it, and so on; `wait` at the end."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._buffers: list[torch.Tensor | None] = [None] * copier.num_buffers
        self._marks: list[Waitable | None] = [None] * copier.num_buffers
        self._turn = 0

    def next(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least `num_bytes`; waits until its last copy has ended."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if (mark := self._marks[self._turn]) is not None:
            mark.wait()
            self._marks[self._turn] = None
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[self._turn] = self._copier.allocate(num_bytes)
        return buffer

    def send(self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Make) -> None:
        """Start to copy `staged`, which are views of the buffer that `next` returned last."""
        self._marks[self._turn] = self._copier.begin(into, staged, make)

    def wait(self) -> None:
        for mark in self._marks:
            if mark is not None:
                mark.wait()


def make_copier(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else CpuCopier()


def copy(into: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy and convert `staged`: the default `Make`."""
    into.copy_(staged)


class CpuCopier:
    num_buffers = 1

    def in_thread(self) -> AbstractContextManager[object]:
        return nullcontext()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def begin(self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Make) -> None:
        make(into, *staged)


class CudaCopier:
    """A copier with one stream per thread.

    The streams wait for the work that the creating thread has launched, which may still use the memory that the copies overwrite.
    """

    num_buffers = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._creators = torch.cuda.current_stream(device)

    def in_thread(self) -> AbstractContextManager[object]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(self._creators)
        context: AbstractContextManager[object] = torch.cuda.stream(stream)
        return context

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Make) -> Waitable:
        if make is copy and staged[0].dtype == into.dtype and into.is_contiguous():
            into.copy_(staged[0], non_blocking=True)
        else:  # convert and unpack on the device, where that is quick; a copy that converts would wait for the device
            make(into, *(part.to(self._device, non_blocking=True) for part in staged))
        return Mark(self._device)
