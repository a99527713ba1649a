"""How a part gets its weights: it names a tensor, says the shape, and receives storage that is read from a checkpoint.

Fused projections are one matrix whose rows come from several tensors, so that a step does one matmul instead of three.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.weights.reader import CheckpointReader


class WeightLoader(NamedTuple):
    """A checkpoint being read into one device and type."""

    reader: CheckpointReader
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        into = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.reader.read(name, into)
        return into

    def rows(self, names: Sequence[str], rows: Sequence[int], *row_shape: int) -> torch.Tensor:
        """Several tensors of the checkpoint stacked along their first dimension."""
        into = torch.empty((sum(rows), *row_shape), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            self.reader.read(name, part)
        return into
