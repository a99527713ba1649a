"""The choice of a rank's device by name, and the allocation of its KV memory.

A new process waits until the memory of a process that has died is freed.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.kv.arena import Arena
from pilotlight.kernels.cpu import library as cpu_kernels
from pilotlight.kernels.cpu import pages

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # limit of the wait for a killed process's memory; 100 GiB are freed after 0.5 to 2 s
_LOOK_S = 0.05
_SETTLED_S = 0.3  # if free memory has not grown for so long, everything has been freed

T = TypeVar("T")


def allocate_patiently(
    allocate: Callable[[], T],
    free_bytes: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `allocate` until it succeeds; if it failed first, wait until free memory grows no more.

    Raises torch.OutOfMemoryError if there is not enough memory after PATIENCE_S.
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


def make_arena(config: HostConfig, device_name: str) -> Arena:
    """Allocate one rank's KV memory. Raises CheckpointError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif len(config.group) > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(config.near_ranks)))
    device = choose_device(device_name)
    if device.type == "cpu":
        cpu_kernels.start()
    try:
        arena = allocate_patiently(lambda: Arena(config.kv_bytes, device), lambda: torch.cuda.mem_get_info(device)[0])
    except (OSError, RuntimeError):  # from the system for host memory, or from torch for a device
        there = memory_of(device) / 2**30
        message = (
            f"a KV cache of {config.kv_bytes / 2**30:g} GiB does not fit into the memory of {device}, {there:.1f} GiB"
        )
        raise CheckpointError(f"{message}; lower kv_gib (of `pilotlight serve`: --kv-gib)") from None
    pages.prefer_huge(arena.span(0, arena.total_bytes))
    return arena


def memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_device(name: str) -> torch.device:
    """Return the device with this name; "auto" is the first working CUDA device, else the CPU.

    Raises CheckpointError for a device that does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"device {name!r} cannot be used here: {reason}; use auto, cpu, cuda or cuda:N") from None
    return device
