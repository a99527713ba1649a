"""MXFP4 (OCP Microscaling Formats 1.0): 32 four-bit floats (e2m1) share a power of two (e8m0).

This module knows the format of checkpoints, and that of kernels, whose products unpack it tile by tile. Every product of value and scale within
bf16's range is exact in bf16, so unpacking by one table look-up for two values and one multiplication is exact.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import coded
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.matrices.coded import CodedWeight, native_linear
from pilotlight.kernels.matrices.int4 import pack_int4, require_codes, unpack_codes
from pilotlight.kernels.matrices.weight import MXFP4, Operands, check_product, lay_operands

BLOCK = 32  # values that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values by exponent and mantissa; the fourth bit is the sign
_E8M0 = (*(2.0 ** (i - 127) for i in range(255)), math.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight(CodedWeight):
    """A weight in MXFP4, with bytes in the order of kernels/matrices/int4.py."""

    of_rows = ("codes", "scales")

    codes: torch.Tensor  # [..., rows, blocks * 16] uint8
    scales: torch.Tensor  # [..., rows, blocks] uint8

    @property
    def columns(self) -> int:
        return self.scales.shape[-1] * BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.columns

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return mxfp4_linear(x, self, bias)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return unpack_mxfp4_weight(self, dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        groups = require_codes(check, name, self.codes, self.columns, BLOCK, shape)
        check.tensor(f"{name}.scales", self.scales, groups, (torch.uint8,))

    def operands(self) -> Operands:
        return lay_operands(self.codes, self.scales.contiguous(), None, self.columns, (1, BLOCK), MXFP4)

    def codes_of_rows(self) -> coded.Codes:
        return coded.Codes(self.codes, self.scales, None, self.columns, BLOCK, coded.MXFP4)


def repack_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Convert checkpoint blocks [..., blocks, 16], with neighbours in a byte, to codes [..., blocks * 16]."""
    return pack_int4(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3))


def unpack_mxfp4_weight(weight: Mxfp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the plain weight [..., rows, columns]."""
    values = torch.tensor((*_E2M1, *(-x for x in _E2M1)), dtype=torch.float32, device=weight.codes.device)
    powers = torch.tensor(_E8M0, dtype=torch.float32, device=weight.codes.device)
    plain = torch.unflatten(values[unpack_codes(weight.codes, weight.columns).int()], -1, (-1, BLOCK))
    return (plain * powers[weight.scales.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """Unpack checkpoint blocks into `into`, bf16 or fp32, which may be strided.

    blocks [..., 16] uint8, the first value of each pair in the low four bits; scales [...] uint8. A scale that is NaN unpacks to NaN.
    """
    _look_at(blocks, scales, into)
    device, dtype = blocks.device, into.dtype
    values = torch.tensor((*_E2M1, *(-x for x in _E2M1)), dtype=dtype, device=device)
    high, low = torch.meshgrid(values, values, indexing="ij")
    pairs = torch.stack((low, high), dim=-1).view(256, 2)  # the two values of each byte
    as_words = pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).squeeze(1)
    # index_select takes 3 ms for an expert of gpt-oss-20b on a CPU core; indexing with brackets takes 55
    unpacked = as_words.index_select(0, blocks.reshape(-1).int()).view(dtype).view(-1, BLOCK)
    unpacked *= torch.tensor(_E8M0, dtype=dtype, device=device)[scales.reshape(-1, 1).int()]
    into.copy_(unpacked.view(into.shape))


def _look_at(blocks: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    check = ArgumentCheck("unpack_mxfp4")
    check.tensor("blocks", blocks, " ".join([*"_" * (blocks.dim() - 1), str(BLOCK // 2)]), (torch.uint8,))
    check.tensor("scales", scales, " ".join(map(str, blocks.shape[:-1])), (torch.uint8,))
    check.tensor("into", into, " ".join("_" * into.dim()), (torch.bfloat16, torch.float32))
    check.require(
        "into", into.numel() == 2 * blocks.numel(), f"has {into.numel()} places for {2 * blocks.numel()} values"
    )


@operation(check_product, triton="matrices.packed", native=native_linear)
def mxfp4_linear(x: torch.Tensor, weight: Mxfp4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [tokens, columns] by the weight; return [tokens, rows]."""
    return F.linear(x, unpack_mxfp4_weight(weight, x.dtype), bias)
