"""Four-bit integer weights with a scale per group of columns: one layout, whatever a checkpoint's was.

Knows the layout and its inverse; refuses to know checkpoints (weights/int4_layouts.py brings theirs here). A value is (code - zero) * scale; zeros
are 8 where a weight has none. In every block of 32 columns, byte j holds column j in its low four bits and column j + 16 in its high ones: a kernel
multiplies both halves of a block without moving a value to another thread (kernels/triton/tiles.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 32  # columns; the last block of a row is padded


class Int4Weight(NamedTuple):
    """One matrix, or with another dimension in front one per expert."""

    codes: torch.Tensor  # [..., rows, blocks * 16] uint8
    scales: torch.Tensor  # [..., rows, groups]
    zeros: torch.Tensor | None  # [..., rows, groups] uint8
    columns: int
    group: int  # columns under one scale, a multiple of 32 unless it is all of them
    # [columns]: column i of the weight is for x[:, permutation[i]]. Some quantizers sort columns by importance, which scatters a group's.
    permutation: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, [..., columns] -> [..., blocks * 16] uint8."""
    codes = torch.unflatten(F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % BLOCK)), -1, (-1, 2, BLOCK // 2))
    # contiguous: codes that were transposed, as AWQ has them, would leave their order in memory behind
    return (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2).contiguous()


def unpack_codes(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """[..., blocks * 16] uint8 -> [..., columns] uint8, the inverse of pack_int4."""
    blocks = torch.unflatten(packed, -1, (-1, BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)[..., :columns]


def unpack_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Its values as a plain weight [..., rows, columns], columns in the packed order. Computed in fp32 and rounded once."""
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
