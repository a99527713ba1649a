"""How a part gets its weights: it names a tensor, says the shape, and receives storage that is read from a checkpoint.

Fused projections are one matrix whose rows come from several tensors, so that a step does one matmul instead of three.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.weights.reader import CheckpointReader
from kernels.cpu import pages
from kernels.mxfp4 import BLOCK, unpack_mxfp4


class WeightLoader(NamedTuple):
    """A checkpoint being read into one device and type."""

    reader: CheckpointReader
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return pages.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        into = self.empty(*shape)
        self.reader.read(name, into)
        return into

    def mxfp4(self, name: str, into: torch.Tensor, *shape: int) -> None:
        """Unpack `{name}_blocks` and `{name}_scales`, a tensor of `shape` whose last dimension is packed, into storage
        of the same leading dimension. One part at a time: unpacked beside itself, all would not fit."""
        groups = (*shape[:-1], shape[-1] // BLOCK)
        blocks = self.reader.packed(f"{name}_blocks", *groups, BLOCK // 2)
        scales = self.reader.packed(f"{name}_scales", *groups)
        for part_blocks, part_scales, part in zip(blocks, scales, into, strict=True):
            unpack_mxfp4(part_blocks.to(self.device), part_scales.to(self.device), part)
        self.reader.expect_finite(f"{name}_scales", into)

    def rows(self, names: Sequence[str], rows: Sequence[int], *row_shape: int) -> torch.Tensor:
        """Several tensors of the checkpoint stacked along their first dimension."""
        into = self.empty(sum(rows), *row_shape)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            self.reader.read(name, part)
        return into
