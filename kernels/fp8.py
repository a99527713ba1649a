"""Eight-bit floats (e4m3) and their scales: of weights one per block, of activations, which are rounded on the way, one per group of columns.

Knows how both are scaled; refuses to know checkpoints. Scales are what values are multiplied by. Activations have a scale per row and
group of columns: 128 of them where the weight's scales change along columns, else the whole row; or one scale for all, where a checkpoint has
measured it beforehand.
"""

from typing import NamedTuple

import torch

from kernels.checks import ArgumentError

LARGEST = 448.0  # of e4m3
GROUP = 128  # columns of activations under one scale
TINY = 1e-12  # the least that the largest of a group is taken for: zeros have a scale too


class Fp8Weight(NamedTuple):
    """One matrix, or with another dimension in front one per expert."""

    values: torch.Tensor  # [..., rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [..., row groups, column groups] fp32
    row_group: int
    column_group: int  # a multiple of 128 unless it is all columns
    input_scale: torch.Tensor | None = None  # [1] fp32, of the activations


def unpack_fp8(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    return unpack_blocks(weight.values, weight.scales, weight.row_group, weight.column_group, dtype)


def unpack_blocks(
    values: torch.Tensor, scales: torch.Tensor, row_group: int, column_group: int, dtype: torch.dtype
) -> torch.Tensor:
    """[..., rows, columns] as plain numbers, computed in fp32 and rounded once."""
    rows, columns = values.shape[-2:]
    return (values.float() * spread(scales, row_group, column_group, rows, columns)).to(dtype)


def activation_group(weight: Fp8Weight) -> int:
    columns = weight.values.shape[-1]
    return columns if weight.column_group >= columns else GROUP


def check_fp8(operation: str, x: torch.Tensor, weight: Fp8Weight, columns: int) -> None:
    if weight.values.dtype != torch.float8_e4m3fn:
        raise ArgumentError(operation, "weight.values", f"has type {weight.values.dtype}; it must be float8_e4m3fn")
    if weight.values.stride(-1) != 1:
        raise ArgumentError(operation, "weight.values", "must be contiguous along its last dimension")
    if weight.values.shape[-1] != columns:
        raise ArgumentError(
            operation, "x", f"has {columns} columns and the weight {weight.values.shape[-1]}; they must be equal"
        )
    if weight.column_group % GROUP and weight.column_group < columns:
        raise ArgumentError(
            operation, "weight.column_group", f"is {weight.column_group}; it must be a multiple of {GROUP}"
        )
    wanted = (-(-weight.values.shape[-2] // weight.row_group), -(-columns // weight.column_group))
    if tuple(weight.scales.shape[-2:]) != wanted or weight.scales.dtype != torch.float32:
        raise ArgumentError(
            operation,
            "weight.scales",
            f"are {list(weight.scales.shape[-2:])} {weight.scales.dtype}; wanted {list(wanted)} float32",
        )


def spread(scales: torch.Tensor, row_group: int, column_group: int, rows: int, columns: int) -> torch.Tensor:
    """One for each value."""
    if row_group > 1:
        scales = scales.repeat_interleave(row_group, -2)[..., :rows, :]
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(column_group, -1)[..., :columns]
    return scales
