"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats (e2m1) under one shared power of two (e8m0).

Unpacks to a type that models compute in, and nothing else. Every product of value and scale that is within bf16's range
is exact in bf16, so that one table look-up for two values and one multiplication lose nothing.
"""

import math

import torch

from kernels.checks import Call, placed

BLOCK = 32  # values under one scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa; the fourth bit is the sign
_E8M0 = (*(2.0 ** (i - 127) for i in range(255)), math.nan)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """blocks [..., 16] uint8, the earlier value of each pair in the low four bits; scales [...] uint8 -> into, strided
    or not, whose values in order are those of the blocks; bf16 or fp32. A scale that is no number unpacks to NaN."""
    if not (
        blocks.dtype == scales.dtype == torch.uint8
        and blocks.dim() > 0
        and blocks.shape == (*scales.shape, BLOCK // 2)
        and into.numel() == 2 * blocks.numel()
        and into.dtype in (torch.bfloat16, torch.float32)
        and placed(into, blocks, scales)
    ):
        _look_at(blocks, scales, into)
    device, dtype = blocks.device, into.dtype
    values = torch.tensor((*_E2M1, *(-x for x in _E2M1)), dtype=dtype, device=device)
    high, low = torch.meshgrid(values, values, indexing="ij")
    pairs = torch.stack((low, high), dim=-1).view(256, 2)  # what each byte holds
    as_words = pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).squeeze(1)
    # index_select: 3 ms for an expert of gpt-oss-20b on a CPU core, where indexing with brackets took 55
    unpacked = as_words.index_select(0, blocks.reshape(-1).int()).view(dtype).view(-1, BLOCK)
    unpacked *= torch.tensor(_E8M0, dtype=dtype, device=device)[scales.reshape(-1, 1).int()]
    into.copy_(unpacked.view(into.shape))


def _look_at(blocks: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    call = Call("unpack_mxfp4")
    call.tensor("blocks", blocks, " ".join([*"_" * (blocks.dim() - 1), str(BLOCK // 2)]), (torch.uint8,))
    call.tensor("scales", scales, " ".join(map(str, blocks.shape[:-1])), (torch.uint8,))
    call.tensor("into", into, " ".join("_" * into.dim()), (torch.bfloat16, torch.float32))
    call.require(
        "into", into.numel() == 2 * blocks.numel(), f"has {into.numel()} places for {2 * blocks.numel()} values"
    )
