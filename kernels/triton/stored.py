"""The operands of kernels/triton/tiles.py for a weight, for each way of storing it. Callers have checked it (kernels/packed.py)."""

from typing import NamedTuple

import torch

from kernels.int4 import Int4Weight
from kernels.mxfp4 import BLOCK, Mxfp4Weight
from kernels.packed import Weight, shape_of

PLAIN, FP8, INT4, MXFP4 = range(4)  # as in tiles.py


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


def operands(weight: Weight) -> Operands:
    """`weight` [..., rows, columns]"""
    columns = shape_of(weight)[-1]
    if isinstance(weight, torch.Tensor):
        assert weight.stride(-1) == 1, "columns must be contiguous"
        return _operands(weight, weight, weight, columns, 1, 1, PLAIN, False)
    if isinstance(weight, Int4Weight):
        zeros = weight.codes if weight.zeros is None else weight.zeros.contiguous()
        group = columns + BLOCK if weight.group >= columns else weight.group
        return _operands(
            weight.codes, weight.scales.contiguous(), zeros, columns, 1, group, INT4, weight.zeros is not None
        )
    if isinstance(weight, Mxfp4Weight):
        return _operands(weight.codes, weight.scales.contiguous(), weight.codes, columns, 1, BLOCK, MXFP4, False)
    group = columns + 1 if weight.column_group >= columns else weight.column_group
    values = weight.values.view(torch.uint8)
    return _operands(values, weight.scales.contiguous(), values, columns, weight.row_group, group, FP8, False)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] with each row contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


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
