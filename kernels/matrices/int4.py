"""Four-bit integer weights with a scale per group of columns, in one layout for all checkpoints.

This module knows the layout and its inverse, and is independent of checkpoints (engine/weights/formats/int4.py converts them). A value is (code -
zero) * scale; zeros are 8 if a weight has none. In every block of 32 columns, byte j holds column j in its low four bits and column j + 16 in its
high ones: a kernel multiplies both halves of a block without moving a value to another thread (kernels/triton/matrices/tiles.py).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, ArgumentCheck
from pilotlight.kernels.cpu import coded
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.matrices.coded import CodedWeight, native_linear
from pilotlight.kernels.matrices.weight import INT4, Operands, check_product, lay_operands, num_groups

BLOCK = 32  # columns per block; the last block of a row is padded


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight(CodedWeight):
    of_rows = ("codes", "scales", "zeros")
    codes: torch.Tensor  # [..., rows, blocks * 16] uint8
    scales: torch.Tensor  # [..., rows, groups]
    zeros: torch.Tensor | None  # [..., rows, groups] uint8
    columns: int
    group: int  # columns that share a scale: a multiple of 32, or all
    # [columns]: column i of the weight is multiplied with x[:, permutation[i]]. Some quantizers sort columns by importance, so a group's columns are
    # scattered in the model's order.
    permutation: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.columns

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int4_linear(x, self, bias)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        plain = unpack_int4(self, dtype)
        return plain if self.permutation is None else plain.index_select(-1, self.permutation.argsort())

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        groups = require_codes(check, name, self.codes, self.columns, self.group, shape)
        check.tensor(f"{name}.scales", self.scales, groups, FLOATS)
        if self.zeros is not None:
            check.tensor(f"{name}.zeros", self.zeros, groups, (torch.uint8,))
        if self.permutation is not None:
            check.tensor(f"{name}.permutation", self.permutation, shape.split()[-1], (torch.int64,))

    def operands(self) -> Operands:
        zeros = None if self.zeros is None else self.zeros.contiguous()
        group = self.columns + BLOCK if self.group >= self.columns else self.group
        scales, is_permuted = self.scales.contiguous(), self.permutation is not None
        return lay_operands(self.codes, scales, zeros, self.columns, (1, group), INT4, is_permuted)

    def codes_of_rows(self) -> coded.Codes:
        return coded.Codes(self.codes, self.scales, self.zeros, self.columns, self.group, coded.INT4, self.permutation)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes from 0 to 15, [..., columns], to [..., blocks * 16] uint8."""
    codes = torch.unflatten(F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % BLOCK)), -1, (-1, 2, BLOCK // 2))
    # contiguous: otherwise transposed codes, such as AWQ's, would stay transposed in memory
    return (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2).contiguous()


def unpack_codes(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack [..., blocks * 16] uint8 to [..., columns] uint8; the inverse of pack_int4."""
    blocks = torch.unflatten(packed, -1, (-1, BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)[..., :columns]


def unpack_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the plain weight [..., rows, columns], in packed column order, rounded once from fp32."""
    codes, scales = unpack_codes(weight.codes, weight.columns), weight.scales.float()
    centred = codes.float()
    if weight.zeros is None:
        centred -= 8
        zeros = None
    else:
        zeros = weight.zeros.float()
    groups = range(0, weight.columns, weight.group)
    for i, (values, start) in enumerate(zip(torch.split(centred, weight.group, dim=-1), groups, strict=True)):
        assert start // weight.group == i
        if zeros is not None:
            values -= zeros[..., i, None]
        values *= scales[..., i, None]
    return centred.to(dtype)


def require_codes(check: ArgumentCheck, name: str, codes: torch.Tensor, columns: int, group: int, shape: str) -> str:
    """Raise ArgumentError if a weight's codes are wrong; return the dimension names of its scales."""
    lead, _, last = shape.rpartition(" ")
    check.agree(f"{name}.columns", last, columns)
    check.derive(f"{name}.bytes", num_groups(columns, BLOCK) * (BLOCK // 2), f"{name}.columns")
    check.tensor(f"{name}.codes", codes, f"{lead} {name}.bytes", (torch.uint8,), dense=1)
    fits = group > 0 and (group % BLOCK == 0 or group >= columns)
    check.require(f"{name}.group", fits, f"is {group}, wanted a multiple of {BLOCK}, or all columns")
    check.derive(f"{name}.groups", num_groups(columns, group), f"{name}.group")
    return f"{lead} {name}.groups"


@operation(check_product, triton="matrices.packed", native=native_linear)
def int4_linear(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [tokens, columns] by the weight; return [tokens, rows].

    The torch form unpacks the whole weight for every call: it is the reference. A CPU without the C library unpacks once, at load: for 4096 x 4096
    and one row of x a thread of Zen 5 takes 58 ms, and 2.6 ms unpacked.
    """
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    return F.linear(x, unpack_int4(weight, x.dtype), bias)
