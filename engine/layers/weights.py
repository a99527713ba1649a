"""How a part gets its weights: it names a tensor, says the shape, and receives storage, which is filled from the checkpoint when the whole model has
been laid out.

Until then nothing may be computed from it: what is to be done to a tensor goes along with the request for it. Fused projections are one matrix whose
rows come from several tensors, so that a step does one matmul instead of three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.weights.filling import Make
from engine.weights.quantization import FLOATS, PACKED, Quantization, join
from engine.weights.reader import Stored
from kernels.mxfp4 import BLOCK, Mxfp4Weight, repack_mxfp4, unpack_mxfp4
from kernels.packed import Packed, Weight, unpack

Arrange = Callable[[torch.Tensor], torch.Tensor]  # of what is stored makes what the model wants


class Storage(Protocol):
    """Where a model's tensors lie, and how they come there."""

    def __contains__(self, name: str) -> bool:
        """The checkpoint has a tensor of that name. Asked only of tensors that are loaded alone, by `tensor`, and of what only a quantized
        checkpoint has: a bundle holds no such thing, so what is to be filled from it is not asked how."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None: ...

    def compute(self, work: Callable[[], None]) -> None: ...

    def skip(self, pattern: str) -> None: ...


class AtOnce(Protocol):
    """Reads tensors when they are asked for."""

    def read(self, stored: Stored, no_number: int | None = None) -> torch.Tensor: ...


class WeightLoader:
    """A model being laid out in one storage and one type. With `packed`, what is stored packed stays so, for kernels that decode weights while they
    read them; without, it is unpacked once, in `dtype`."""

    def __init__(
        self,
        storage: Storage,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        packed: AtOnce | None = None,
    ) -> None:
        self._storage = storage
        self.dtype = dtype
        self.device = device
        self._quantization = quantization
        self._packed = packed

    def __contains__(self, name: str) -> bool:
        return name in self._storage

    def with_dtype(self, dtype: torch.dtype) -> "WeightLoader":
        return WeightLoader(self._storage, dtype, self.device, self._quantization, self._packed)

    def has_rows(self, names: Sequence[str]) -> bool:
        """Whether `rows` would find them, where the family does not say so itself."""
        return _stacked(names) in self._storage or all(name in self._storage for name in names)

    @property
    def is_quantized(self) -> bool:
        return self._quantization is not None

    @property
    def keeps_packed(self) -> bool:
        return self._packed is not None

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        into = self.empty(name, *shape)
        self.read(name, into)
        return into

    def rows(self, names: Sequence[str], rows: Sequence[int], *row_shape: int) -> torch.Tensor:
        """Several tensors of the checkpoint stacked along their first dimension."""
        into = self.empty(_stacked(names), sum(rows), *row_shape)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            self.read(name, part)
        return into

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Weight:
        """The projections called `names`, one below the other: as numbers, or packed where they are and kernels want them so."""
        format, weights = self._quantization, [f"{name}.weight" for name in names]
        if format is None or not any(format.is_kept(self._storage, name) for name in names):
            return self.rows(weights, rows, columns)
        if self._packed is not None and format.has_kernels(self.device):
            parts = [
                self._read_packed(format, self._packed, name, n, columns) for name, n in zip(names, rows, strict=True)
            ]
            return join(parts, names)
        into = self.empty(_stacked(weights), sum(rows), columns)
        for name, part in zip(names, torch.split(into, list(rows)), strict=True):
            if format.is_kept(self._storage, name):
                stored = format.stored(self._storage, name, part.shape[0], columns)
                self.fill(part, stored, _Unpack(format, name, [one[0] for one in stored]), is_cut=False)
            else:
                self.read(f"{name}.weight", part)
        return into

    def packed_mxfp4(self, name: str, *shape: int) -> Mxfp4Weight:
        """`{name}_blocks` and `{name}_scales`, a tensor of `shape`, as kernels want it."""
        assert self._packed is not None, "only what keeps_packed has read at once"
        groups = (*shape[:-1], shape[-1] // BLOCK)
        blocks = self._packed.read((f"{name}_blocks", (*groups, BLOCK // 2), PACKED)).to(self.device)
        scales = self._packed.read((f"{name}_scales", groups, PACKED), no_number=255).to(self.device)
        return Mxfp4Weight(repack_mxfp4(blocks), scales)

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

    def _read_packed(self, format: Quantization, packed: AtOnce, name: str, rows: int, columns: int) -> Packed:
        stored = format.stored(self._storage, name, rows, columns)
        make = format.pretended if self.device.type == "meta" else format.make
        return make(name, rows, columns, {one[0]: packed.read(one).to(self.device) for one in stored})


@dataclass(frozen=True, slots=True)
class _Unpack:
    """What is made of a quantized matrix where it does not stay packed."""

    format: Quantization
    name: str
    stored: Sequence[str]

    def __call__(self, into: torch.Tensor, *tensors: torch.Tensor) -> None:
        rows, columns = into.shape
        made = self.format.make(self.name, rows, columns, dict(zip(self.stored, tensors, strict=True)))
        into.copy_(unpack(made, into.dtype))


def _stacked(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}"


def _unpack_each(into: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    for part, part_blocks, part_scales in zip(into, blocks, scales, strict=True):
        unpack_mxfp4(part_blocks, part_scales, part)
