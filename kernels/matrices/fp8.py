"""Eight-bit floats (e4m3) with scales: per block for weights, per group of columns for activations.

This module knows how both are scaled, and is independent of checkpoints. A scale is the factor by which stored values are multiplied. Activations are
rounded on the fly. All of them have one scale if the checkpoint contains a measured scale; otherwise each row and group of columns has a scale. A
group has 128 columns if the weight's scales change along columns, else all columns.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.matrices.weight import FP8, Operands, Weight, check_product, lay_operands, num_groups

LARGEST = 448.0  # largest value of e4m3
GROUP = 128  # columns of activations that share a scale
TINY = 1e-12  # lower bound of a group's largest value, so that a group of zeros has a scale above 0


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(Weight):
    of_rows = ("values", "scales")
    values: torch.Tensor  # [..., rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [..., row groups, column groups] fp32
    row_group: int
    column_group: int  # columns that share a scale: a multiple of 128, or all
    input_scale: torch.Tensor | None = None  # [1] fp32, for the activations

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fp8_linear(x, self, bias)

    def rows(self, numbers: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        values = self.values.view(torch.uint8)[numbers].view(torch.float8_e4m3fn)
        return unpack_blocks(values, self.scales[numbers // self.row_group], 1, self.column_group, dtype) * scale

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return unpack_fp8(self, dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        *lead, rows, columns = shape.split()
        check.tensor(f"{name}.values", self.values, shape, (torch.float8_e4m3fn,), dense=1)
        group = self.column_group
        fits = group > 0 and self.row_group > 0 and (group % GROUP == 0 or group >= check.size(columns))
        check.require(f"{name}.column_group", fits, f"is {group}, wanted a multiple of {GROUP}, or all columns")
        check.derive(f"{name}.row_groups", num_groups(check.size(rows), self.row_group), name)
        check.derive(f"{name}.column_groups", num_groups(check.size(columns), group), name)
        groups = " ".join([*lead, f"{name}.row_groups", f"{name}.column_groups"])
        check.tensor(f"{name}.scales", self.scales, groups, (torch.float32,))
        if self.input_scale is not None:
            is_one = _is_one_number(self.input_scale)
            check.require(f"{name}.input_scale", is_one, "is not one fp32 number")
            check.tensor(f"{name}.input_scale", self.input_scale.reshape(1), "1", (torch.float32,))

    def operands(self) -> Operands:
        columns = self.values.shape[-1]
        group = columns + 1 if self.column_group >= columns else self.column_group
        values, scales = self.values.view(torch.uint8), self.scales.contiguous()
        return lay_operands(values, scales, None, columns, (self.row_group, group), FP8)


def unpack_fp8(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    return unpack_blocks(weight.values, weight.scales, weight.row_group, weight.column_group, dtype)


def unpack_blocks(
    values: torch.Tensor, scales: torch.Tensor, row_group: int, column_group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [..., rows, columns] as plain numbers, computed in fp32 and rounded once."""
    rows, columns = values.shape[-2:]
    return (values.float() * spread(scales, row_group, column_group, rows, columns)).to(dtype)


def activation_group(weight: Fp8Weight) -> int:
    columns = weight.values.shape[-1]
    return columns if weight.column_group >= columns else GROUP


def spread(scales: torch.Tensor, row_group: int, column_group: int, rows: int, columns: int) -> torch.Tensor:
    """Return the scales repeated, one per value."""
    if row_group > 1:
        scales = scales.repeat_interleave(row_group, -2)[..., :rows, :]
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(column_group, -1)[..., :columns]
    return scales


def _is_one_number(x: torch.Tensor) -> bool:
    return x.numel() == 1 and x.dtype == torch.float32


@operation(check_product, triton="matrices.fp8_linear")
def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [tokens, columns], rounded to FP8, by the weight; return [tokens, rows]."""
    values, scales = quantise_fp8(x, activation_group(weight), weight.input_scale)
    wide = unpack_blocks(values, scales, 1, activation_group(weight), torch.float32)
    product = F.linear(wide, unpack_fp8(weight, torch.float32), None if bias is None else bias.float())
    return product.to(x.dtype)


def _check_activations(check: ArgumentCheck, x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> None:
    check.tensor("x", x, "tokens columns")
    check.require("group", group > 0, f"is {group}, wanted at least one column under a scale")
    if scale is not None:
        check.require("scale", scale.numel() == 1, f"has {scale.numel()} numbers, wanted a single one")
        check.tensor("scale", scale.reshape(1), "1", (torch.float32,))


@operation(_check_activations, triton="matrices.fp8_linear")
def quantise_fp8(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x to FP8; return values [tokens, columns] float8_e4m3fn and scales [tokens, groups] fp32.

    A given `scale` is used for all values; those beyond the largest number saturate.
    """
    tokens, columns = x.shape
    groups = -(-columns // group)
    if scale is None:
        padded = F.pad(x.float(), (0, groups * group - columns)).view(tokens, groups, group)
        scales = padded.abs().amax(-1).clamp(min=TINY) / LARGEST
    else:
        scales = scale.expand(tokens, groups).contiguous()
    wide = x.float() / spread(scales, 1, group, tokens, columns)
    return wide.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
