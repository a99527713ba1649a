"""The memory of the host tier's slots.

It is allocated page by page in a file, and registered with a device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pilotlight.engine.device.cuda_runtime import CudaRuntime
from pilotlight.engine.device.registered_memory import PIECE_BYTES
from pilotlight.support.file_calls import allocate_pages


@dataclass(frozen=True)
class SlotMemory:
    device: torch.device
    piece_bytes: int = PIECE_BYTES  # about so many bytes are registered together
    registrar: CudaRuntime | None = None  # registers memory with the device; None for the device's driver
    allocate: Callable[[int, int, int], None] = allocate_pages


CPU_MEMORY = SlotMemory(torch.device("cpu"))
