"""Eight-bit floats (e4m3) and their scales: of weights one per block, of activations, which are rounded on the way, one per group of columns.

Knows how both are scaled; refuses to know checkpoints. Scales are what values are multiplied by. Activations have a scale per row and
group of columns: 128 of them where the weight's scales change along columns, else the whole row; or one scale for all, where a checkpoint has
measured it beforehand.
"""

from typing import NamedTuple

import torch

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


def spread(scales: torch.Tensor, row_group: int, column_group: int, rows: int, columns: int) -> torch.Tensor:
    """Return one scale for each value."""
    if row_group > 1:
        scales = scales.repeat_interleave(row_group, -2)[..., :rows, :]
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(column_group, -1)[..., :columns]
    return scales
