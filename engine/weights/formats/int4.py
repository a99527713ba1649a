"""Matrices in four bits with a scale per group of columns: compressed-tensors, GPTQ and AWQ.

If matrices stay packed, two small tensors are read first, because their contents decide the layout: whether any zero point differs from 8, and
whether columns were quantized in the order of their importance (g_idx), which scatters the columns of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.formats.int4_layouts import CODES, Awq, Gptq, Int4Layout
from pilotlight.engine.weights.shard import MatrixPart, require_units
from pilotlight.engine.weights.stored_tensor import AxisRange, ExpectedTensor
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.int4 import BLOCK, Int4Weight, pack_int4

_WORDS = ("I32",)
_INDICES = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class Int4Format(WeightFormat):
    layout: Int4Layout
    group: int | None  # columns per scale; None for a scale per row
    stores_zeros: bool  # whether there are zero points; GPTQ and AWQ always store them, as 8 if they are not needed
    needs_zeros: bool  # whether zero points differ from 8 according to config.json

    def stays_packed(self, device: torch.device) -> bool:
        return device.type == "cuda" or (device.type == "cpu" and library.takes_codes())

    def holds(self, index: Index, name: str) -> bool:
        return f"{name}.{self.layout.codes_name}" in index

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        matrix = self._matrix(part)
        stored = [matrix.codes]
        if has_zeros := self.stores_zeros:
            stored.append(matrix.zeros)
        if has_order := matrix.g_idx.name in loader:
            stored.append(matrix.g_idx)

        def unpack(into: torch.Tensor, *tensors: torch.Tensor) -> None:
            order = matrix.order(tensors[-2]) if has_order else None
            zeros = matrix.read_zeros(tensors[1]) if has_zeros else None
            codes, scales = matrix.read_codes(order, tensors[0]), matrix.read_scales(tensors[-1])
            into.copy_(Int4Weight(codes, scales, zeros, *matrix.sizes, order).unpack(into.dtype))

        # The scales come last, because errors name the last tensor, and only scales can contain NaN or infinity.
        loader.fill(into, [*stored, matrix.scales], unpack, is_row_wise=False)

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        """True if all parts have the same order of columns; with experts it must be the original order."""
        first, *others = [_look_at_order(loader, self._matrix(part)) for part in parts]
        if first is None:
            return all(order is None for order in others)
        return experts == 1 and all(order is not None and torch.equal(order, first) for order in others)

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Int4Weight:
        name, matrices = stacked_name([part.name for part in parts]), [self._matrix(part) for part in parts]
        order = _look_at_order(loader, matrices[0])
        columns, group = matrices[0].sizes
        rows = [part.rows.size for part in parts]
        groups, is_row_wise = -(-columns // group), self.layout.is_row_wise
        codes = loader.take(f"{name}.codes", (sum(rows), -(-columns // BLOCK) * (BLOCK // 2)), torch.uint8)
        scales = loader.take(f"{name}.scales", (sum(rows), groups), loader.stored_dtype(matrices[0].scales.name))
        zeros = None
        if any([self._differ(loader, matrix) for matrix in matrices]):
            zeros = loader.take(f"{name}.zeros", (sum(rows), groups), torch.uint8)
        for i, matrix in enumerate(matrices):
            place = slice(sum(rows[:i]), sum(rows[: i + 1]))
            loader.fill(codes[place], [matrix.codes], partial(_fill, partial(matrix.read_codes, order)), is_row_wise)
            loader.fill(scales[place], [matrix.scales], partial(_fill, matrix.read_scales), is_row_wise)
            if zeros is not None:
                loader.fill(zeros[place], [matrix.zeros], partial(_fill, matrix.read_zeros), is_row_wise=False)
        return Int4Weight(codes, scales, zeros, columns, group, None if order is None else order.to(loader.device))

    def _matrix(self, part: MatrixPart) -> "_StoredMatrix":
        name, rows, columns = part
        group = part.group(self.group, BLOCK)
        for span in (rows, columns):
            require_units(span, CODES, name, "codes in one word")
        return _StoredMatrix(name, rows, columns, group, self.layout)

    def _differ(self, loader: WeightRequests, matrix: "_StoredMatrix") -> bool:
        """Return True if zero points differ from 8; if they cannot be read, config.json decides."""
        found = loader.look(matrix.zeros) if self.stores_zeros else None
        return self.needs_zeros if found is None else bool((matrix.read_zeros(found) != 8).any())


@dataclass(frozen=True, slots=True)
class _StoredMatrix:
    """The needed part of one matrix: the tensors that contain it, and their conversions."""

    name: str
    rows: AxisRange
    columns: AxisRange
    group: int
    layout: Int4Layout

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of columns, and how many of them share a scale."""
        return self.columns.size, min(self.group, self.columns.size)

    @property
    def codes(self) -> ExpectedTensor:
        dims = self.layout.codes_dims(self.rows, self.columns)
        return ExpectedTensor.of(f"{self.name}.{self.layout.codes_name}", dims, _WORDS)

    @property
    def zeros(self) -> ExpectedTensor:
        dims = self.layout.zeros_dims(self.rows, self.columns.over(self.group))
        return ExpectedTensor.of(f"{self.name}.{self.layout.zeros_name}", dims, _WORDS)

    @property
    def scales(self) -> ExpectedTensor:
        dims = self.layout.scales_dims(self.rows, self.columns.over(self.group))
        return ExpectedTensor.of(f"{self.name}.{self.layout.scales_name}", dims, FLOATS)

    @property
    def g_idx(self) -> ExpectedTensor:
        """The tensor with the group of each column, for all columns of the matrix."""
        return ExpectedTensor.of(f"{self.name}.{self.layout.g_idx_name}", (self.columns.total,), _INDICES)

    def read_codes(self, order: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor:
        """Return the codes of a run of rows, packed for the kernels."""
        codes = self.layout.codes(words)[: self.rows.size, : self.columns.size]
        return pack_int4(codes if order is None else codes[:, order.to(codes.device)])

    def read_zeros(self, words: torch.Tensor) -> torch.Tensor:
        return self.layout.zeros(words)[: self.rows.size]

    def read_scales(self, stored: torch.Tensor) -> torch.Tensor:
        return self.layout.scales(stored)

    def order(self, g_idx: torch.Tensor) -> torch.Tensor | None:
        """Return the indices that sort the columns by group; None if they are sorted already.

        Raises CheckpointError if groups have different sizes, or ranks share a matrix with unsorted columns.
        """
        groups = self.columns.total // self.group
        in_order = torch.arange(self.columns.total, device=g_idx.device) // self.group
        if torch.equal(g_idx.long(), in_order):
            return None
        if not torch.equal(g_idx.sort().values.long(), in_order):
            raise CheckpointError(
                f"tensor {self.g_idx.name} does not put {self.group} columns into each of {groups} groups"
            )
        if not self.columns.is_whole:
            raise CheckpointError(
                f"{self.name} has columns in an order of importance ({self.layout.g_idx_name}), which ranks cannot share"
            )
        return g_idx.argsort(stable=True)


def read_gptq(described: Mapping[str, Any]) -> Int4Format:
    _check_bits("gptq", described)
    form = described.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"config.json's quantization_config has checkpoint_format = {form!r}; supported are gptq and gptq_v2"
        )
    return Int4Format(Gptq(2 if form == "gptq_v2" else 1), _group(described), True, not described.get("sym", True))


def read_awq(described: Mapping[str, Any]) -> Int4Format:
    _check_bits("awq", described)
    version = described.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise CheckpointError(
            f"config.json's quantization_config has version = {version!r}; supported for awq is 'gemm'"
        )
    return Int4Format(Awq(), _group(described), True, bool(described.get("zero_point", True)))


def read_group(value: Any) -> int | None:
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json's quantization_config has group_size = {value!r}; it must be positive, or -1 for whole rows"
        )
    return value


def _check_bits(method: str, described: Mapping[str, Any]) -> None:
    bits = described.get("bits", described.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"config.json's quantization_config has bits = {bits!r}; supported for {method} is 4")


def _group(described: Mapping[str, Any]) -> int | None:
    return read_group(described.get("group_size", described.get("q_group_size", 128)))


def _look_at_order(loader: WeightRequests, matrix: _StoredMatrix) -> torch.Tensor | None:
    found = loader.look(matrix.g_idx) if matrix.g_idx.name in loader else None
    return None if found is None else matrix.order(found)


def _fill(read: Any, into: torch.Tensor, stored: torch.Tensor) -> None:
    into.copy_(read(stored))
