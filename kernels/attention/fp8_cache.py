"""Keys and values in FP8 (e4m3: four bits of exponent, three of mantissa, up to 448): half the bytes of bf16, with one fp32 scale per layer for keys
and one for values.

Knows how a number is stored; refuses to know who chose the scales. What is read is exact in fp16 and bf16, so scales are applied to sums.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def is_fp8(cache: torch.Tensor) -> bool:
    return cache.dtype == FP8


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, to the nearest that FP8 has, ties to even; what is larger becomes the largest. NaN stays NaN."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8)
