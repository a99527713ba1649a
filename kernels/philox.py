"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random numbers without a
state.

A sampled token's number is a function of (seed, position) alone, so a stream resumed elsewhere, a different batch or a
preemption draws the same. Written in int64 tensor arithmetic: the same bits on every device.
"""

import torch

_MASK32 = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four counter words and two key words, each an int64 tensor holding 32-bit values -> four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two 32-bit words wraps in int64, but its bits are right; the mask after the arithmetic shift
        # drops the sign.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, p1 & _MASK32
        c2, c3 = ((p0 >> 32) & _MASK32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, float64 with 53 random bits. Seeds are split into 32-bit halves: int64 has no room
    for 2**64 - 1."""
    zero = torch.zeros_like(position)
    w0, w1, _, _ = philox4x32((position & _MASK32, (position >> 32) & _MASK32, zero, zero), (seed_low, seed_high))
    return ((w0 << 21) | (w1 >> 11)).double() * 2.0**-53
