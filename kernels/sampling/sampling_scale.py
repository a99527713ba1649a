"""The scale on which logits are compared in sampling: the cost of a distance from the highest logit.

This module does not import torch.
"""

import math

FAR = 63 << 24  # the cost of tokens without weight, which are less likely than 2**-63 of the likeliest
GREEDY_SCALE = 2.0**100  # the scale for a temperature of 0, at which any distance from the highest logit costs FAR
PIECE = 1024  # vocabulary entries summed together before the cumulative sum; as in cpu/sample.c


def scale_of(temperature: float) -> float:
    """Return the cost of a distance of one, which is rounded to fp32 when it is used."""
    return GREEDY_SCALE if temperature == 0 else min(math.log2(math.e) / temperature * 2.0**24, GREEDY_SCALE / 2)


def highest_cost(min_p: float) -> int:
    """Return the highest cost that min-p allows."""
    return FAR if min_p <= 0.0 else min(FAR, max(0, math.floor(-math.log2(min_p) * 2.0**24)))
