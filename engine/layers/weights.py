"""How a part gets its weights: it names a tensor, says the shape, and receives storage, which is filled from the checkpoint when the whole model has
been laid out.

Until then nothing may be computed from it: what is to be done to a tensor goes along with the request for it. Fused projections are one matrix whose
rows come from several tensors, so that a step does one matmul instead of three.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.weights.filling import Make
from kernels.mxfp4 import BLOCK, unpack_mxfp4

FLOATS = ("F32", "F16", "BF16")
PACKED = ("U8",)
Stored = tuple[
    str, tuple[int, ...], Sequence[str]
]  # a tensor of the checkpoint: name, shape, and the types it may have
Arrange = Callable[[torch.Tensor], torch.Tensor]  # of what is stored makes what the model wants


class Storage(Protocol):
    """Where a model's tensors lie, and how they come there."""

    def __contains__(self, name: str) -> bool:
        """The checkpoint has a tensor of that name. Asked only of tensors that are loaded alone, by `tensor`."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None: ...

    def compute(self, work: Callable[[], None]) -> None: ...

    def skip(self, pattern: str) -> None: ...


class WeightLoader:
    """A model being laid out in one storage and one type."""

    def __init__(self, storage: Storage, dtype: torch.dtype, device: torch.device) -> None:
        self._storage = storage
        self.dtype = dtype
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self._storage

    def with_dtype(self, dtype: torch.dtype) -> "WeightLoader":
        return WeightLoader(self._storage, dtype, self.device)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        into = self.empty(name, *shape)
        self.read(name, into)
        return into

    def rows(self, names: Sequence[str], rows: Sequence[int], *row_shape: int) -> torch.Tensor:
        """Several tensors of the checkpoint stacked along their first dimension."""
        into = self.empty(names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}", sum(rows), *row_shape)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            self.read(name, part)
        return into

    def empty(self, name: str, *shape: int) -> torch.Tensor:
        """Storage that the caller has filled in parts: by `read`, `mxfp4` or `fill`."""
        return self._storage.take(name, shape, self.dtype)

    def read(
        self,
        name: str,
        into: torch.Tensor,
        stored_shape: tuple[int, ...] | None = None,
        arrange: Arrange | None = None,
        is_cut: bool = False,
    ) -> None:
        """Tensor `name`, its type converted. The shape must agree exactly: with into's, or with `stored_shape`, from which `arrange` makes
        into's. `is_cut`: `arrange` makes a row of a row, so any run of rows may be arranged alone."""
        stored = (name, stored_shape or tuple(into.shape), FLOATS)
        if arrange is None:
            self.fill(into, [stored], None)
        else:
            self.fill(into, [stored], lambda part, source: part.copy_(arrange(source)), is_cut)

    def mxfp4(self, name: str, into: torch.Tensor, *shape: int) -> None:
        """Unpack `{name}_blocks` and `{name}_scales`, a tensor of `shape` whose last dimension is packed, into storage
        of the same leading dimension. One part at a time: unpacked beside itself, all would not fit."""
        groups = (*shape[:-1], shape[-1] // BLOCK)
        stored = [(f"{name}_blocks", (*groups, BLOCK // 2), PACKED), (f"{name}_scales", groups, PACKED)]
        self.fill(into, stored, _unpack_each)

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool = True) -> None:
        """make(into, *stored) once the storage is there, or, where rows of `into` come from the same rows of what is stored (`is_cut`), for
        one run of rows after another; from any thread."""
        self._storage.fill(into, stored, make, is_cut)

    def compute(self, work: Callable[[], None]) -> None:
        """Something the model needs that no checkpoint holds, done while the weights are read."""
        self._storage.compute(work)

    def skip(self, pattern: str) -> None:
        """Tensors that are known to be redundant: they need not be read."""
        self._storage.skip(pattern)


def _unpack_each(into: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    for part, part_blocks, part_scales in zip(into, blocks, scales, strict=True):
        unpack_mxfp4(part_blocks, part_scales, part)
