"""The memory of the host tier's slots.

It is allocated page by page in a file, and registered with a device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime
from pilotlight.engine.device.registered_memory import PIECE_BYTES


def allocate_pages(fd: int, offset: int, num_bytes: int) -> None:
    """Allocate a file's pages, on systems that can. Raises OSError if the file system is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, num_bytes)


@dataclass(frozen=True)
class SlotMemory:
    device: torch.device
    piece_bytes: int = PIECE_BYTES  # about so many bytes are registered together
    registrar: CudaRuntime | None = None  # registers memory with the device; None for the device's driver
    allocate: Callable[[int, int, int], None] = allocate_pages


CPU_MEMORY = SlotMemory(torch.device("cpu"))
