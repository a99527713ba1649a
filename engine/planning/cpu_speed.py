"""The speed of this machine's CPU, measured in about a second.

The shares in devices.py are relative to these ceilings: bytes read from memory much larger than the caches, and FLOPs of a prompt's products.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from pilotlight.engine.planning.devices import Device, cpu
from pilotlight.kernels.cpu import library, pages
from pilotlight.kernels.cpu.build import BuildError, LibraryBuild
from pilotlight.kernels.matrices.linear import linear

_READ_BYTES = 512 << 20
_ROWS, _INNER, _COLUMNS = 512, 1024, 4096  # a prompt's product with a matrix of weights
_REPEATS = 3


@torch.inference_mode()
def measured_cpu(dtype: torch.dtype) -> Device:
    """Return this machine's CPU with speeds measured now.

    All of torch's threads read memory, and multiply matrices of `dtype`."""
    with suppress(BuildError):
        if LibraryBuild().find() is not None:  # a plan is not worth waiting for a compiler
            library.start()
    memory = pages.empty((_READ_BYTES,), torch.uint8).fill_(1)
    x, weight = (torch.randn(rows, _INNER).to(dtype) for rows in (_ROWS, _COLUMNS))
    read_s = _least_s(lambda: _read(memory))
    product_s = _least_s(lambda: linear(x, weight))
    return cpu(_READ_BYTES / read_s, 2 * _ROWS * _INNER * _COLUMNS / product_s, "ceilings measured on this machine")


def _read(memory: torch.Tensor) -> None:
    if library.loaded is None:
        memory.view(torch.int64).sum()
    else:
        library.loaded.sum_words(memory.data_ptr(), memory.numel() // 4, torch.get_num_threads())


def _least_s(work: Callable[[], object]) -> float:
    """Return the shortest time of several calls after one that warms up."""
    work()
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)
