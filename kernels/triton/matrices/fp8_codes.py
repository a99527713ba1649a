"""Conversions between FP8 (e4m3) and bytes inside a kernel, in hardware if available, else bit by bit.

Bytes are used because Triton's interpreter narrows to FP8 wrongly (a rounded-up mantissa does not carry into the exponent, 3.6 to 3.9) and Ampere has
no FP8.
"""

from functools import cache

import torch
import triton.language as tl

from pilotlight.kernels.triton.jit import jit

NONE, BY_BITS, BY_HARDWARE = 0, 1, 2  # values of a kernel's FP8 parameter


@jit
def decode_fp8(code, FP8: tl.constexpr):
    """Convert uint8 to fp16, exactly."""
    if FP8 == 2:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # fp16's exponent bias is larger by eight, and its mantissa longer by seven bits
        wide = code.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(tl.float16)
    return value


@jit
def encode_fp8(x, FP8: tl.constexpr):
    """Convert fp32 to uint8, rounded to nearest even; values beyond 448 become 448, NaN stays NaN."""
    is_nan = x != x
    size = tl.minimum(tl.abs(x), 448.0)
    if FP8 == 2:
        magnitude = size.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        # From 2^-6 on, 20 bits of mantissa are rounded off, and the exponent's bias is 7 instead of 127. Below it values are multiples of 2^-9, which
        # is the last bit of a sum with 2^14.
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        magnitude = tl.where(size < 0.015625, tiny, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(is_nan, 0x7F, magnitude | sign).to(tl.uint8)


@cache
def _has_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def conversion(kv_scales: torch.Tensor | None) -> int:
    """Return the FP8 parameter for a cache with these scales."""
    if kv_scales is None:
        return NONE
    return BY_HARDWARE if _has_hardware(kv_scales.device) else BY_BITS


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
