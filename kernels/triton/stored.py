"""What the kernels of kernels/triton/tiles.py want to know of a weight, for each way of storing it."""

from typing import NamedTuple

import torch

from kernels.checks import ArgumentError
from kernels.fp8 import Fp8Weight, check_fp8
from kernels.int4 import Int4Weight, check_int4
from kernels.mxfp4 import BLOCK, Mxfp4Weight, check_mxfp4

Stored = torch.Tensor | Int4Weight | Mxfp4Weight | Fp8Weight
PLAIN, FP8, INT4, MXFP4 = range(4)  # as in tiles.py
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Operands(NamedTuple):
    """Strides are counted in elements; those of experts are 0 for a weight that is one matrix."""

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    rows: int
    columns: int
    weight_expert: int
    weight_row: int
    scales_expert: int
    scales_row: int
    row_group: int
    column_group: int
    format: int
    has_zeros: bool


def operands(operation: str, x: torch.Tensor, weight: Stored, columns: int, name: str = "weight") -> Operands:
    """Raises ArgumentError unless x, whose rows have `columns` values, can be multiplied with the weight."""
    if isinstance(weight, torch.Tensor):
        if weight.dtype != x.dtype or weight.shape[-1] != columns or weight.stride(-1) != 1:
            _complain(operation, x, weight, columns, name)
        return _operands(weight, weight, weight, columns, 1, 1, PLAIN, False)
    if isinstance(weight, Int4Weight):
        check_int4(operation, x, weight, columns)
        zeros = weight.codes if weight.zeros is None else weight.zeros.contiguous()
        group = columns + BLOCK if weight.group >= columns else weight.group
        return _operands(
            weight.codes, weight.scales.contiguous(), zeros, columns, 1, group, INT4, weight.zeros is not None
        )
    if isinstance(weight, Mxfp4Weight):
        check_mxfp4(operation, x, weight, columns)
        return _operands(weight.codes, weight.scales.contiguous(), weight.codes, columns, 1, BLOCK, MXFP4, False)
    check_fp8(operation, x, weight, columns)
    group = columns + 1 if weight.column_group >= columns else weight.column_group
    values = weight.values.view(torch.uint8)
    return _operands(values, weight.scales.contiguous(), values, columns, weight.row_group, group, FP8, False)


def check_rows(operation: str, name: str, x: torch.Tensor) -> None:
    """Rows of numbers, each contiguous."""
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in _FLOATS:
        if x.dim() != 2:
            raise ArgumentError(operation, name, f"has {x.dim()} dimensions; it must have two")
        if x.dtype not in _FLOATS:
            raise ArgumentError(operation, name, f"has type {x.dtype}; it must be one of float32, float16, bfloat16")
        if x.shape[1] > 1:
            raise ArgumentError(operation, name, "must be contiguous along its rows; call .contiguous() first")


def _operands(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    columns: int,
    row_group: int,
    column_group: int,
    format: int,
    has_zeros: bool,
) -> Operands:
    experts = values.dim() == 3
    return Operands(
        values, scales, zeros, values.shape[-2], columns,
        values.stride(0) if experts else 0, values.stride(-2),
        scales.stride(0) if experts else 0, scales.stride(-2),
        row_group, column_group, format, has_zeros,
    )  # fmt: skip


def _complain(operation: str, x: torch.Tensor, weight: torch.Tensor, columns: int, name: str) -> None:
    if weight.dtype != x.dtype:
        raise ArgumentError(operation, name, f"has type {weight.dtype} and x {x.dtype}; they must be equal")
    if weight.shape[-1] != columns:
        raise ArgumentError(
            operation, "x", f"has {columns} columns and the weight {weight.shape[-1]}; they must be equal"
        )
    if columns > 1:
        raise ArgumentError(operation, name, "must be contiguous along its last dimension")
