"""Memory of a device that a dead process still holds: its driver gives it back within seconds, and a new host waits for it.

Knows time and free bytes; refuses to know what the memory is for.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # a process with 100 GiB is gone after half a second to two
_LOOK_S = 0.05
_SETTLED_S = 0.3  # without any more of it: what was freed has been freed

T = TypeVar("T")


def allocate_patiently(
    allocate: Callable[[], T],
    free_bytes: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `allocate` until it finds the memory. Had it to wait, whoever comes next finds all that is being freed. Raises torch.OutOfMemoryError
    where patience does not help."""
    end, had_to_wait = clock() + PATIENCE_S, False
    while True:
        try:
            allocated = allocate()
            break
        except torch.OutOfMemoryError:
            if clock() >= end:
                raise
            if not had_to_wait:
                log.info("the device's memory is taken: waiting for what a process that has ended gives back")
            had_to_wait = True
            sleep(_LOOK_S)
    if had_to_wait:
        _wait_until_settled(free_bytes, end, clock, sleep)
    return allocated


def _wait_until_settled(
    free_bytes: Callable[[], int], end: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    most, since = free_bytes(), clock()
    while (now := clock()) < end and now - since < _SETTLED_S:
        sleep(_LOOK_S)
        if (free := free_bytes()) > most:
            most, since = free, clock()
