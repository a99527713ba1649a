"""A model's wakes so far: how long they took, from where, and the failures.

They determine the expected duration of the next wake, and when it may be retried after a failure.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from pilotlight.wire.errors import ApiError

# The kind of a wake. disk: from the checkpoint; host: from host memory; swap: another model was put to sleep for it; crash: its host had died;
# sibling: an extra replica, from the first replica's copy in host memory.
Clock = Literal["disk", "host", "swap", "crash", "sibling"]
RETRY_FAILED_S = 10.0  # after this time a request may retry a failed load
# Hints of routers and pinned models retry after a delay that doubles with each failure, up to this limit: otherwise a broken model would be read, and
# evict other models, every ten seconds.
RETRY_FAILED_MAX_S = 300.0
# Assumed before the first measurement: speeds of reading from a disk and of mapping from host memory, and a wake's fixed time.
_DISK_BYTES_PER_S, _HOST_BYTES_PER_S, _LEAST_S = 1e9, 8e9, 0.05


class Wake(NamedTuple):
    """A completed wake, for the metrics."""

    model: str
    clock: Clock
    ms: float
    phases: tuple[tuple[str, float], ...]  # (name, seconds), in order


class WakeHistory:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.wakes = 0
        self.evictions = 0
        self.last_ms = 0.0
        self.last_ms_from: dict[Literal["disk", "host"], float] = {}
        self.is_cut = False  # the host died, so the next wake counts as "crash"
        self.failure: ApiError | None = None  # error of the last wake
        self.failed_at = 0.0
        self.failures = 0  # number of failures in a row

    @property
    def has_failed_lately(self) -> bool:
        """Tell whether the last wake failed so recently that a request must not start another."""
        return self._clock() - self.failed_at < RETRY_FAILED_S

    @property
    def is_given_up(self) -> bool:
        """Tell whether the last wake failed so recently that only a waiting request may start another."""
        if self.failure is None:
            return False
        retry_after_s = min(RETRY_FAILED_MAX_S, RETRY_FAILED_S * 2.0 ** min(self.failures - 1, 10))
        return self._clock() - self.failed_at < retry_after_s

    @property
    def lacked_a_host(self) -> bool:
        """Tell whether the last wake failed because no host was up, and not because of the model."""
        return self.failure is not None and self.failure.word == "overloaded"

    def expected_s(self, is_in_host_memory: bool, num_bytes: int) -> float:
        """Return a wake's expected seconds: those of the last wake from host memory or from disk.
        Without such a wake it is an estimate by size."""
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
