"""The bytes of stored tensors: their types, and a whole tensor or a part of one in memory.

filling.py reads a checkpoint's tensors into a model; this module reads single small ones, and is independent of models.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.stored_tensor import StoredTensor
from pilotlight.kernels.cpu.mapped_file import opened

Write = Callable[[int, memoryview], None]  # writes bytes at an offset

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_into(fd: int, file: Path, start: int, memory: memoryview) -> None:
    """Fill `memory` from offset `start` of a file. Raises CheckpointError if the file ends too early."""
    at = 0
    while at < len(memory):
        count = os.preadv(fd, [memory[at:]], start + at)
        if count == 0:
            raise CheckpointError(f"{file.name} was cut off while it was read; fetch the checkpoint again")
        at += count


def read_stored(stored: StoredTensor) -> torch.Tensor:
    """Read and return a stored tensor, or a part of one. Raises CheckpointError for an unknown type."""
    if stored.dtype not in DTYPES:
        raise CheckpointError(f"{stored.file.name} holds tensors of type {stored.dtype}; known are {', '.join(DTYPES)}")
    memory = torch.empty(stored.end - stored.start, dtype=torch.uint8)
    with opened(stored.file) as fd:
        read_into(fd, stored.file, stored.start, as_bytes(memory))
    whole = memory.view(DTYPES[stored.dtype]).view(stored.shape)
    return whole[:, *stored.inner] if stored.inner else whole


def as_bytes(memory: torch.Tensor) -> memoryview:
    """View a contiguous tensor on the host as bytes; also works for bf16, which numpy does not support."""
    assert memory.is_contiguous()
    assert memory.is_cpu
    if memory.nbytes == 0:
        return memoryview(b"")
    content = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    content.owner = memory  # type: ignore[attr-defined]  # the memory must live as long as the view
    return memoryview(content).cast("B")


def is_stored_as(into: torch.Tensor, stored: StoredTensor) -> bool:
    """Return True if the stored bytes are the tensor's bytes, without conversion."""
    return DTYPES[stored.dtype] == into.dtype and not stored.inner
