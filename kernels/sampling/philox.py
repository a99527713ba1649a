"""Philox4x32-10 (Salmon et al., "Parallel random numbers", SC 2011): stateless random numbers.

A sampled token's number is a function of (seed, position) alone, so a stream resumed elsewhere, a different batch or a preemption draws the same. It
is computed in int64 tensors, with the same bits on every device.
"""

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import sampling
from pilotlight.kernels.dispatch import operation

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # factors of counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # increments of the key words per round: golden ratio, sqrt(3) - 1
_ROUNDS = 10


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return random words [4, n] for counter [4, n] and key [2, n], both int64 with 32-bit words.

    Words 0 and 2, and 1 and 3, share each operation.
    """
    device = counter.device
    multipliers = torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1)
    growth = torch.arange(_ROUNDS, device=device).view(-1, 1, 1) * torch.tensor(_WEYL, device=device).unsqueeze(1)
    keys = ((key + growth) & _MASK32).unbind()  # [2, n] per round
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        # A product of two 32-bit words overflows int64, but its bits are right; the mask after the arithmetic shift drops the sign.
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & _MASK32) ^ odd ^ round_key, product & _MASK32
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def _check(check: ArgumentCheck, seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> None:
    for name, words in (("seed_low", seed_low), ("seed_high", seed_high), ("position", position)):
        check.tensor(name, words, "rows", (torch.int64,))


@operation(_check, native=sampling.philox_uniform)
def uniform(seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return one number in [0, 1) per row, float64 with 53 random bits.

    A seed is passed as two 32-bit halves, because int64 cannot hold 2**64 - 1.
    """
    zero = torch.zeros_like(position)
    words = philox4x32(
        torch.stack((position & _MASK32, position >> 32, zero, zero)), torch.stack((seed_low, seed_high))
    )
    return ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
