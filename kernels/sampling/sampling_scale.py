"""The scale on which logits are compared when a token is chosen, for all forms of it: what a distance from the highest costs, and what is far.

Numbers alone: no tensors, and no torch.
"""

import math

FAR = 63 << 24  # of what weighs nothing: 2**-63 of the likeliest
GREEDY_SCALE = 2.0**100  # a temperature of 0: whatever differs from the highest is far away
PIECE = 1024  # vocabulary entries summed together before the cumulative sum; as in cpu/sample.c


def scale_of(temperature: float) -> float:
    """Return the cost of a distance of one, to be rounded to fp32 where it is used."""
    return GREEDY_SCALE if temperature == 0 else min(math.log2(math.e) / temperature * 2.0**24, GREEDY_SCALE / 2)


def highest_cost(min_p: float) -> int:
    """Return the highest cost that min-p allows."""
    return FAR if min_p <= 0.0 else min(FAR, max(0, math.floor(-math.log2(min_p) * 2.0**24)))
