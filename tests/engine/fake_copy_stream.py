"""A fake copy stream that copies late: nothing is copied until something waits for it, so code that does not wait sees the old content."""

import ctypes
from collections.abc import Callable

import torch


class FakeCopyStream:
    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.copied: list[tuple[int, int, int]] = []  # destination address, source address, bytes
        self.events: list[str] = []
        self.num_marks = 0
        self.num_until_failure = -1
        self.on_wait: Callable[[], None] = lambda: None

    def mark(self) -> object:
        self.num_marks += 1
        return f"mark {self.num_marks}"

    def wait_for(self, mark: object) -> None:
        assert not self.queue, "copies of the previous turn are still under way"
        self.events.append(f"wait for {mark}")

    def begin_copy(self, into: int, source: int, num_bytes: int) -> None:
        if self.num_until_failure == 0:
            raise RuntimeError("the device is gone")
        self.num_until_failure -= 1
        self.queue.append((into, source, num_bytes))
        self.events.append("copy")

    def started(self) -> "FakeEvent":
        return FakeEvent(self, len(self.copied) + len(self.queue))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def copy_until(self, number: int) -> None:
        self.on_wait()
        self.events.append("wait")
        while len(self.copied) < number:
            self.copied.append(self.queue.pop(0))
            ctypes.memmove(*self.copied[-1])


class FakeEvent:
    def __init__(self, stream: FakeCopyStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.copy_until(self._number)
