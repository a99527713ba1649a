"""Paired differences: the probability that they are random, and a confidence interval of their mean.

Independent of the measurements.
"""

import random
from collections.abc import Sequence
from statistics import fmean

ROUNDS = 10_000


def chance(differences: Sequence[float], rng: random.Random, rounds: int = ROUNDS) -> float:
    """Return the p-value of a two-sided permutation test of the mean.

    That is the share of random changes of the signs after which the mean is at least as far from zero.
    """
    observed = abs(sum(differences))
    beyond = 1
    for _ in range(rounds):
        signs = rng.getrandbits(len(differences))
        total = sum(-value if signs >> i & 1 else value for i, value in enumerate(differences))
        beyond += abs(total) >= observed
    return beyond / (rounds + 1)


def interval(differences: Sequence[float], rng: random.Random, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the bounds between which the mean lies with 95 % confidence (percentiles of the bootstrap)."""
    means = sorted(fmean(rng.choices(differences, k=len(differences))) for _ in range(rounds))
    return means[round(0.025 * (rounds - 1))], means[round(0.975 * (rounds - 1))]
