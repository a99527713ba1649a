"""Keys and values in FP8: half the bytes of bf16, and two fp32 scales per layer, one for each.

The format is e4m3 (four bits of exponent, three of mantissa, up to 448). This module knows how a number is stored, and is independent of where the
scales come from. Stored values are exact in fp16 and bf16, so products use them as they are and only their sums are scaled.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SIZE = 1e-4  # with one scale per vector, smaller numbers alone make it no smaller


def is_fp8(cache: torch.Tensor) -> bool:
    return cache.dtype == FP8


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x / scale in FP8, rounded to nearest even, saturated at the largest value; NaN stays NaN."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8)
