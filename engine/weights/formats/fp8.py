"""Matrices in FP8 (e4m3) with one scale per block, per row, or per matrix."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.config import require_modelopt_fp8
from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.shard import MatrixPart, require_units
from pilotlight.engine.weights.stored_tensor import AxisRange, ExpectedTensor
from pilotlight.kernels.matrices.fp8 import GROUP, Fp8Weight

_VALUES = ("F8_E4M3",)


@dataclass(frozen=True, slots=True)
class Fp8Format(WeightFormat):
    block: tuple[int, int] | None  # rows and columns per scale; None for a scale per row or per matrix

    def stays_packed(self, device: torch.device) -> bool:
        """Return True on GPUs that multiply FP8: Ada, Hopper and later."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

    def holds(self, index: Index, name: str) -> bool:
        return f"{name}.weight_scale" in index or f"{name}.weight_scale_inv" in index

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        scales = self._scales(loader, part)
        for expected in _input_scales(loader, part.name):
            loader.skip(re.escape(expected.name))

        def unpack(into: torch.Tensor, stored: torch.Tensor, values: torch.Tensor) -> None:
            if not bool(stored.isfinite().all()):
                raise CheckpointError(f"tensor {scales.stored.name} holds NaN or infinity; fetch the checkpoint again")
            into.copy_(Fp8Weight(values, scales.by_row(stored), 1, scales.column_group).unpack(into.dtype))

        loader.fill(into, [scales.stored, _values(part)], unpack, is_row_wise=False)

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Fp8Weight:
        name = stacked_name([part.name for part in parts])
        scales = [self._scales(loader, part) for part in parts]
        is_by_row = any(not of.is_joinable(part.rows, len(parts)) for of, part in zip(scales, parts, strict=True))
        row_group = 1 if is_by_row else scales[0].row_group
        rows = [part.rows.size for part in parts]
        values = loader.take(f"{name}.values", (sum(rows), parts[0].columns.size), torch.float8_e4m3fn)
        groups = [-(-n // row_group) for n in rows]
        factors = loader.take(f"{name}.scales", (sum(groups), scales[0].num_columns), torch.float32)
        for i, (part, into) in enumerate(zip(parts, torch.split(values, rows), strict=True)):
            loader.fill(into, [_values(part)], None)
            of = scales[i]
            make = of.fill_by_row if is_by_row else of.fill_groups
            loader.fill(torch.split(factors, groups)[i], [of.stored], make, is_row_wise=False)
        return Fp8Weight(values, factors, row_group, scales[0].column_group, self._input_scale(loader, name, parts))

    def _input_scale(self, loader: WeightRequests, name: str, parts: Sequence[MatrixPart]) -> torch.Tensor | None:
        """Request the largest input scale, so that no part's activations are clipped; None if a part has none."""
        stored = [expected for part in parts for expected in _input_scales(loader, part.name)]
        if len(stored) < len(parts):
            for expected in stored:
                loader.skip(re.escape(expected.name))
            return None
        into = loader.take(f"{name}.input_scale", (1,), torch.float32)
        loader.fill(into, stored, _widest, is_row_wise=False)
        return into

    def _scales(self, loader: WeightRequests, part: MatrixPart) -> "_Scales":
        name = f"{part.name}.weight_scale" + ("_inv" if f"{part.name}.weight_scale_inv" in loader else "")
        shape, rows, columns = loader.shape(name), part.rows, part.columns
        if self.block is not None:
            row_group, column_group = self.block
            require_units(columns, column_group, part.name, "columns under one scale")
            groups = columns.over(column_group)
            stored = ExpectedTensor.of(name, (rows.over(row_group), groups), FLOATS)
            return _Scales(stored, row_group, column_group, rows, groups.size)
        if torch.Size(shape).numel() == 1:
            return _Scales(ExpectedTensor.of(name, shape, FLOATS), rows.total, columns.size, rows, 1)
        # One scale per row: the tensor's shape is [rows, 1] or [rows].
        dims: tuple[AxisRange | int, ...] = (rows,) if len(shape) == 1 else (rows, 1)
        return _Scales(ExpectedTensor.of(name, dims, FLOATS), 1, columns.size, rows, 1)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of one matrix: their tensor, and how many rows and columns share each scale."""

    stored: ExpectedTensor
    row_group: int
    column_group: int
    rows: AxisRange
    num_columns: int

    def is_joinable(self, rows: AxisRange, parts: int) -> bool:
        """True if groups of rows that share a scale stay whole when this many parts are stacked."""
        if parts == 1:
            return rows.start % self.row_group == 0 or self.row_group >= rows.total
        return self.row_group < rows.total and rows.start % self.row_group == 0 == rows.size % self.row_group

    def by_row(self, stored: torch.Tensor) -> torch.Tensor:
        groups = stored.float().reshape(-1, self.num_columns)
        first = 0 if self.row_group >= self.rows.total else self.rows.start % self.row_group
        return groups.repeat_interleave(self.row_group, 0)[first : first + self.rows.size]

    def fill_by_row(self, into: torch.Tensor, stored: torch.Tensor) -> None:
        into.copy_(self.by_row(stored))

    def fill_groups(self, into: torch.Tensor, stored: torch.Tensor) -> None:
        into.copy_(stored.reshape(into.shape))


def read_fp8(described: Mapping[str, Any]) -> Fp8Format:
    block = described.get("weight_block_size")
    return Fp8Format(None if block is None else read_block(block))


def read_modelopt(described: Mapping[str, Any]) -> Fp8Format:
    """Parse NVIDIA ModelOpt's description.

    The tensors of scales show whether there is one scale per matrix or one per row. Raises CheckpointError for formats other than FP8.
    """
    require_modelopt_fp8(described)
    return Fp8Format(None)


def read_block(value: Any) -> tuple[int, int]:
    if (
        not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value))
        or value[1] % GROUP
    ):
        raise CheckpointError(
            f"config.json's quantization_config has blocks of {value!r}; they must be [rows, columns], the columns a multiple of {GROUP}"
        )
    return value[0], value[1]


def _values(part: MatrixPart) -> ExpectedTensor:
    return ExpectedTensor.of(f"{part.name}.weight", (part.rows, part.columns), _VALUES)


def _input_scales(index: Index, name: str) -> list[ExpectedTensor]:
    """Return the input scale of a matrix, as a list of one tensor; empty if there is none."""
    for tensor in (f"{name}.input_scale", f"{name}.activation_scale"):
        if tensor in index:
            shape = index.shape(tensor)
            if torch.Size(shape).numel() != 1:
                raise CheckpointError(f"tensor {tensor} has shape {list(shape)}; it must be one number")
            return [ExpectedTensor.of(tensor, shape, FLOATS)]
    return []


def _widest(into: torch.Tensor, *ranges: torch.Tensor) -> None:
    into.copy_(torch.stack([one.float().view(1) for one in ranges]).amax(0))
