"""Waiting for device memory of a dead process, which its driver frees within seconds.

Knows time and free bytes; does not know what the memory is for.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # a process with 100 GiB is gone after half a second to two
_LOOK_S = 0.05
_SETTLED_S = 0.3  # without an increase: everything has been freed

T = TypeVar("T")


def allocate_patiently(
    allocate: Callable[[], T],
    free_bytes: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `allocate` until there is enough memory; after a wait, also wait until all of it is freed.

    Raises torch.OutOfMemoryError if that does not happen in time.
    """
    end, had_to_wait = clock() + PATIENCE_S, False
    while True:
        try:
            allocated = allocate()
            break
        except torch.OutOfMemoryError:
            if clock() >= end:
                raise
            if not had_to_wait:
                log.info("the device's memory is full: waiting for the memory of a process that has ended")
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
