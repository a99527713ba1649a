"""Waiting for device memory that a dead process releases while a new host needs it."""

import pytest
import torch

from pilotlight.engine.device.device import PATIENCE_S, allocate_patiently


class Device:
    """A device of 100 bytes. A dead process holds `held` of them, and from `after_s` on releases 10 every tenth of a second."""

    def __init__(self, held: int, after_s: float = 0.5) -> None:
        self.held, self.after_s, self.now, self.taken = held, after_s, 0.0, 0

    def free(self) -> int:
        given_back = max(0, int((self.now - self.after_s) * 100))
        return 100 - max(0, self.held - given_back) - self.taken

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def allocate(self, wanted: int) -> int:
        if self.free() < wanted:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.taken += wanted
        return wanted

    def take(self, wanted: int) -> int:
        return allocate_patiently(lambda: self.allocate(wanted), self.free, self.clock, self.sleep)


def test_what_is_free_is_not_waited_for() -> None:
    device = Device(held=0)
    assert device.take(90) == 90
    assert device.now == 0


def test_a_new_host_waits_for_what_the_driver_still_frees_and_then_for_all_of_it() -> None:
    device = Device(held=95)
    assert device.take(60) == 60
    assert device.free() == 40, "the next weights also get their memory"
    assert device.now < 3


def test_memory_that_never_comes_is_refused_in_time() -> None:
    device = Device(held=95, after_s=1e9)
    with pytest.raises(torch.OutOfMemoryError):
        device.take(60)
    assert PATIENCE_S <= device.now < PATIENCE_S + 0.2
