"""A model's wakes so far: how long they took, from where, and those that failed.

From these follows what the next one is expected to take, and when it may be tried again.
"""

import time
from typing import Literal, NamedTuple

from pilotlight.wire.errors import ApiError

# From the checkpoint; from host memory; another model slept for it; its host had died; a further replica, from the host memory of the first.
Clock = Literal["disk", "host", "swap", "crash", "sibling"]
RETRY_FAILED_S = 10.0  # a load that failed is tried again by a request after so long
# For hints of routers and pinned models the delay doubles with each failure, up to this: a permanently broken model must not be read, and evict
# others, every ten seconds.
RETRY_FAILED_MAX_S = 300.0
# What waking is guessed to take before it has been measured: reading at a disk's pace, or mapping what is in memory.
_DISK_BYTES_PER_S, _HOST_BYTES_PER_S, _LEAST_S = 1e9, 8e9, 0.05


class Wake(NamedTuple):
    """One counted wake."""

    model: str
    clock: Clock
    ms: float
    phases: tuple[tuple[str, float], ...]  # (name, seconds), in order


class WakeHistory:
    def __init__(self) -> None:
        self.wakes = 0
        self.evictions = 0
        self.last_ms = 0.0
        self.last_ms_from: dict[Literal["disk", "host"], float] = {}
        self.is_cut = False  # its host died during the wake
        self.failure: ApiError | None = None  # of the last wake
        self.failed_at = 0.0
        self.failures = 0  # in a row

    @property
    def has_failed_lately(self) -> bool:
        """Too lately for a request that is here to begin another."""
        return time.monotonic() - self.failed_at < RETRY_FAILED_S

    @property
    def is_given_up(self) -> bool:
        """Tell whether the last wake failed so recently that only a waiting request may start another."""
        if self.failure is None:
            return False
        retry_after_s = min(RETRY_FAILED_MAX_S, RETRY_FAILED_S * 2.0 ** min(self.failures - 1, 10))
        return time.monotonic() - self.failed_at < retry_after_s

    @property
    def lacked_a_host(self) -> bool:
        """The last one failed for want of a host, and not by the model."""
        return self.failure is not None and self.failure.word == "overloaded"

    def expected_s(self, is_in_host_memory: bool, num_bytes: int) -> float:
        """Return the duration of a wake from the model's place: as last measured, or estimated by size."""
        measured = self.last_ms_from.get("host" if is_in_host_memory else "disk", 0.0)
        if measured:
            return measured / 1e3
        return _LEAST_S + num_bytes / (_HOST_BYTES_PER_S if is_in_host_memory else _DISK_BYTES_PER_S)

    def note_wake(self, ms: float, was_in_host_memory: bool) -> None:
        self.last_ms = self.last_ms_from["host" if was_in_host_memory else "disk"] = ms
        self.wakes, self.failures, self.is_cut = self.wakes + 1, 0, False

    def note_failure(self, failure: ApiError) -> None:
        self.failures += 1
        self.failure = failure
