"""Statistics of paired differences: noise is likely by chance, a shift is not, and the interval contains the mean."""

import random
from statistics import fmean

from load_tests.paired import chance, interval


def test_noise_is_likely_and_a_shift_is_not() -> None:
    rng = random.Random(1)
    noise = [rng.gauss(0, 1) for _ in range(100)]
    assert chance(noise, rng, 1000) > 0.05
    assert chance([value + 1 for value in noise], rng, 1000) < 0.01
    assert chance([value - 1 for value in noise], rng, 1000) < 0.01


def test_the_share_of_signs_is_that_of_all_of_them() -> None:
    """Four equal differences have 16 sign patterns; only the two with equal signs are as extreme."""
    assert abs(chance([1.0] * 4, random.Random(2), 20_000) - 2 / 16) < 0.01


def test_the_interval_narrows_with_more_differences() -> None:
    rng = random.Random(3)
    few, many = [rng.gauss(5, 1) for _ in range(20)], [rng.gauss(5, 1) for _ in range(500)]
    for values in (few, many):
        low, high = interval(values, rng, 1000)
        assert low < fmean(values) < high
    assert interval(many, rng, 1000)[1] - interval(many, rng, 1000)[0] < 0.25
