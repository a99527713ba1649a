"""The scale on which logits are compared in sampling: the cost of a distance from the highest logit.

Numbers only: no tensors, no torch.
"""

import math

FAR = 63 << 24  # the cost of tokens without weight: 2**-63 of the likeliest
GREEDY_SCALE = 2.0**100  # a temperature of 0: any distance from the highest is far
PIECE = 1024  # vocabulary entries summed together before the cumulative sum; as in cpu/sample.c


def scale_of(temperature: float) -> float:
    """Return the cost of a distance of one, to be rounded to fp32 at its use."""
    return GREEDY_SCALE if temperature == 0 else min(math.log2(math.e) / temperature * 2.0**24, GREEDY_SCALE / 2)


def highest_cost(min_p: float) -> int:
    """Return the highest cost that min-p allows."""
    return FAR if min_p <= 0.0 else min(FAR, max(0, math.floor(-math.log2(min_p) * 2.0**24)))
