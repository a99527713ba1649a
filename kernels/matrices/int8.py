"""Eight-bit integer weights with a scale per row or per group of columns: a value is code * scale.

This module knows the layout, and is independent of checkpoints (engine/weights/formats/int8.py converts them). A CPU multiplies without unpacking;
there is no form for GPUs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, ArgumentCheck
from pilotlight.kernels.cpu.coded import INT8, Codes
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.matrices.coded import CodedWeight, native_linear
from pilotlight.kernels.matrices.weight import check_product, num_groups

BLOCK = 32  # columns per block; the last block of a row is padded with zeros


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(CodedWeight):
    of_rows = ("codes", "scales")
    codes: torch.Tensor  # [..., rows, blocks * 32] int8
    scales: torch.Tensor  # [..., rows, groups]
    columns: int
    group: int  # columns that share a scale: a multiple of 32, or all

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.columns

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int8_linear(x, self, bias)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the plain weight, computed in fp32 and rounded once."""
        scales = self.scales.float().repeat_interleave(self.group, -1)[..., : self.columns]
        return (self.codes[..., : self.columns].float() * scales).to(dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        lead, _, last = shape.rpartition(" ")
        check.agree(f"{name}.columns", last, self.columns)
        check.derive(f"{name}.bytes", num_groups(self.columns, BLOCK) * BLOCK, f"{name}.columns")
        check.tensor(f"{name}.codes", self.codes, f"{lead} {name}.bytes", (torch.int8,), dense=1)
        fits = self.group > 0 and (self.group % BLOCK == 0 or self.group >= self.columns)
        check.require(f"{name}.group", fits, f"is {self.group}, wanted a multiple of {BLOCK}, or all columns")
        check.derive(f"{name}.groups", num_groups(self.columns, self.group), f"{name}.group")
        check.tensor(f"{name}.scales", self.scales, f"{lead} {name}.groups", FLOATS)

    def codes_of_rows(self) -> Codes:
        return Codes(self.codes, self.scales, None, self.columns, self.group, INT8)


def pad_int8(codes: torch.Tensor) -> torch.Tensor:
    """Pad [..., columns] int8 with zeros to [..., blocks * 32]."""
    return F.pad(codes, (0, -codes.shape[-1] % BLOCK))


@operation(check_product, native=native_linear)
def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [tokens, columns] by the weight; return [tokens, rows]."""
    return F.linear(x, weight.unpack(x.dtype), bias)
