"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats (e2m1) under one shared power of two (e8m0).

Unpacks to a type that models compute in, and nothing else: every e2m1 value times every scale within the type's range
is exact in bf16.
"""

import torch

BLOCK = 32  # values under one scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa; the fourth bit is the sign
_SCALE_BIAS = 127
SCALE_NAN = 255


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """blocks [rows, num_blocks, 16] uint8, the earlier value of each pair in the low four bits; scales
    [rows, num_blocks] uint8 -> into [rows, num_blocks * 32]."""
    values = torch.tensor(_E2M1 + tuple(-x for x in _E2M1), dtype=torch.float32, device=blocks.device)
    pairs = torch.cartesian_prod(values, values).flip(1)  # [256, 2]: a byte's two values, the low one first
    unpacked = pairs.index_select(0, blocks.reshape(-1).int()).view(*scales.shape, BLOCK)
    # fp32 products: 6 * 2^127 is beyond every type, and its infinity is then found where weights are checked
    exponents = scales.int() - _SCALE_BIAS
    into.copy_(torch.ldexp(unpacked, exponents.unsqueeze(-1)).view(into.shape))
