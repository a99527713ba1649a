"""The page's history turns counters into rates and percentiles, in a ring buffer of fixed size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.page.history import RANGES, History, quantile, sample_of
from pilotlight.page.source import TimeHistogram
from tests.page.fakes import counts


def test_a_second_is_the_difference_of_two_readings() -> None:
    before = counts(requests={"ok": 10}, tokens=100, prompt_tokens=50, cached_tokens=10)
    after = counts(
        requests={"ok": 14, "overloaded": 2}, tokens=160, prompt_tokens=90, cached_tokens=40, running=3, waiting=1
    )
    sample = sample_of(100.0, before, 102.0, after)
    assert sample.requests == {"ok": 2.0, "overloaded": 1.0}
    assert (sample.tokens, sample.cached_share, sample.running, sample.waiting) == (30.0, 0.75, 3, 1)
    assert sample.first_token_ms is None, "nothing was measured"


def test_a_site_that_was_started_anew_takes_nothing_away() -> None:
    sample = sample_of(
        0.0, counts(tokens=500, prompt_tokens=50, cached_tokens=50), 1.0, counts(tokens=20, prompt_tokens=5)
    )
    assert (sample.tokens, sample.cached_share) == (0.0, None)


def test_percentiles_are_of_the_stretch_alone() -> None:
    old, new = TimeHistogram((10.0, 100.0), (90, 0, 0)), TimeHistogram((10.0, 100.0), (90, 10, 0))
    sample = sample_of(0.0, counts(first_token=old), 1.0, counts(first_token=new))
    assert sample.first_token_ms == (55.0, 95.5, 99.1)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(numbers: list[int], share: float) -> None:
    bounds = (1.0, 2.0, 5.0)
    found = quantile(bounds, numbers, share)
    rank = share * sum(numbers)
    below = [sum(numbers[: i + 1]) for i in range(4)]
    bucket = min(next(i for i, most in enumerate(below) if most >= rank - 1e-9), 2)
    assert (0.0, *bounds)[bucket] - 0.01 <= found <= bounds[bucket] + 0.01


def test_the_ring_holds_a_day_and_no_more() -> None:
    history = History()
    seconds = 2 * 3600
    for second in range(seconds + 1):
        history.note(float(second), counts(tokens=5 * second))
    for name, one in RANGES.items():
        samples = history.samples(name)
        assert len(samples) == min(one.length, seconds // one.step)
        assert samples[-1].at == seconds
        assert samples[-1].at - samples[0].at == one.step * (len(samples) - 1)
        assert {sample.tokens for sample in samples} == {5.0}
    assert RANGES["24h"].step * RANGES["24h"].length == 24 * 3600


def test_a_range_that_is_not_kept_is_an_error() -> None:
    with pytest.raises(KeyError):
        History().samples("1y")
