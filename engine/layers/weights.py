"""How a part gets its weights: it names a tensor, says the shape, and receives storage that is read from a checkpoint.

Fused projections are one matrix whose rows come from several tensors, so that a step does one matmul instead of three.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.weights.quantization import Quantization, join
from engine.weights.reader import CheckpointReader
from kernels.cpu import pages
from kernels.mxfp4 import BLOCK, Mxfp4Weight, repack_mxfp4, unpack_mxfp4
from kernels.packed import Weight, unpack


class WeightLoader(NamedTuple):
    """A checkpoint being read into one device and type."""

    reader: CheckpointReader
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None

    @property
    def keeps_packed(self) -> bool:
        """Where kernels decode weights while they read them. On a CPU they are unpacked once, in `dtype`: torch would unpack them for every step."""
        return self.device.type == "cuda"

    @property
    def loaded_bytes(self) -> int:
        """What the weights take once they are loaded."""
        if self.keeps_packed and self.reader.is_packed:
            return self.reader.total_bytes
        return self.reader.num_parameters * self.dtype.itemsize

    def empty(self, *shape: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return pages.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        into = self.empty(*shape)
        self.reader.read(name, into)
        return into

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Weight:
        """The projections called `names`, one below the other: as numbers, or packed where they are and kernels want them so."""
        format = self.quantization
        if format is None or not any(format.is_kept(self.reader, name) for name in names):
            return self.rows([f"{name}.weight" for name in names], rows, columns)
        if self.keeps_packed and format.has_kernels(self.device):
            parts = [
                format.read(self.reader, name, n, columns, self.device) for name, n in zip(names, rows, strict=True)
            ]
            return join(parts, names)
        into = self.empty(sum(rows), columns)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            if format.is_kept(self.reader, name):
                part.copy_(unpack(format.read(self.reader, name, part.shape[0], columns, self.device), self.dtype))
            else:
                self.reader.read(f"{name}.weight", part)
        return into

    def packed_mxfp4(self, name: str, *shape: int) -> Mxfp4Weight:
        """`{name}_blocks` and `{name}_scales`, a tensor of `shape`, as kernels want it."""
        groups = (*shape[:-1], shape[-1] // BLOCK)
        blocks = self.reader.packed(f"{name}_blocks", *groups, BLOCK // 2).to(self.device)
        scales = self.reader.packed(f"{name}_scales", *groups).to(self.device)
        self.reader.expect_finite(f"{name}_scales", torch.where((scales == 255).any(), torch.nan, 0.0))
        return Mxfp4Weight(repack_mxfp4(blocks), scales)

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
