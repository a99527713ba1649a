"""Tensors of a checkpoint that are read when they are asked for, not when the model has been laid out: weights that stay packed.

How they are arranged depends on what is in them (whether zero points are all the same, whether columns are in order), so it is known only then.
Knows files; refuses to know formats.
"""

import os

import torch

from engine.errors import CheckpointError
from engine.weights.filling import DTYPES, ReadingProgress, as_bytes, read_into
from engine.weights.reader import Checkpoint, Stored

_NO_NUMBERS = 127  # of e4m3, beside the sign


class PackedReader:
    def __init__(self, checkpoint: Checkpoint, on_progress: ReadingProgress) -> None:
        self.done_bytes = 0
        self._checkpoint = checkpoint
        self._on_progress = on_progress

    def read(self, stored: Stored, no_number: int | None = None) -> torch.Tensor:
        """In host memory, in its own type. `no_number`: the byte that means none. Raises CheckpointError where there is one."""
        found = self._checkpoint.find(*stored)
        num_bytes = found.end - found.start
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        fd = os.open(found.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read_into(fd, found.file, found.start, as_bytes(memory))
        finally:
            os.close(fd)
        values = memory.view(DTYPES[found.dtype]).view(found.shape)
        if not _are_numbers(values, no_number):
            raise CheckpointError(
                f"tensor {stored[0]} in {found.file.name} holds NaN or infinity; fetch the checkpoint again"
            )
        self.done_bytes += num_bytes
        self._on_progress(self.done_bytes, self._checkpoint.num_bytes)
        return values


def _are_numbers(values: torch.Tensor, no_number: int | None) -> bool:
    if values.dtype == torch.float8_e4m3fn:
        return not bool((values.view(torch.uint8) & 127 == _NO_NUMBERS).any())
    if values.is_floating_point():
        return bool(values.isfinite().all())
    return no_number is None or not bool((values == no_number).any())
