"""Samples of the last day, in rings of limited size.

There is one a second for five minutes, one in ten seconds for an hour, and one in two minutes for a day.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pilotlight.page.source import Counts, TimeHistogram


class TimeRange(NamedTuple):
    step: int  # seconds per sample
    length: int  # number of samples


RANGES = {"5m": TimeRange(1, 300), "1h": TimeRange(10, 360), "24h": TimeRange(120, 720)}


class Sample(msgspec.Struct, frozen=True):
    """A sample of a period. Rates are per second; a percentile is None without measurements."""

    at: float  # Unix time at the end of the period
    requests: dict[str, float]  # ended requests per second, by outcome
    tokens: float
    cached_share: float | None  # cached share of the prompt tokens
    first_token_ms: tuple[float, float, float] | None  # percentiles 50, 95 and 99
    token_ms: tuple[float, float, float] | None
    running: int
    waiting: int


class History:
    """The samples of a process's counters, taken once a second."""

    def __init__(self) -> None:
        self._rings = {name: deque[Sample](maxlen=one.length) for name, one in RANGES.items()}
        self._started: dict[str, tuple[float, Counts]] = {}  # range -> time and counters at the start of its period
        self._num_seconds = 0

    def note(self, at: float, counts: Counts) -> Sample | None:
        """Record a reading of the counters; return the last second's sample, or None at the first call."""
        if not self._started:
            self._started = dict.fromkeys(RANGES, (at, counts))
            return None
        self._num_seconds += 1
        newest = None
        for name, one in RANGES.items():
            if self._num_seconds % one.step == 0:
                sample = sample_of(*self._started[name], at, counts)
                self._started[name] = (at, counts)
                self._rings[name].append(sample)
                newest = newest or sample
        return newest

    def samples(self, name: str) -> tuple[Sample, ...]:
        """Return a range's samples, the oldest first. Raises KeyError if it is not one of RANGES."""
        return tuple(self._rings[name])


def sample_of(started: float, before: Counts, at: float, after: Counts) -> Sample:
    """Return the difference of two readings.
    A counter that fell because a site restarted counts as unchanged."""
    seconds = max(at - started, 1e-3)

    def per_s(old: int, new: int) -> float:
        return round(max(0, new - old) / seconds, 3)

    requests = {word: per_s(before.requests.get(word, 0), number) for word, number in after.requests.items()}
    prompt = max(0, after.prompt_tokens - before.prompt_tokens)
    cached = max(0, after.cached_tokens - before.cached_tokens)
    return Sample(
        at=round(at, 1),
        requests={word: rate for word, rate in requests.items() if rate},
        tokens=per_s(before.tokens, after.tokens),
        cached_share=round(min(1.0, cached / prompt), 4) if prompt else None,
        first_token_ms=_percentiles(before.first_token, after.first_token),
        token_ms=_percentiles(before.token_gaps, after.token_gaps),
        running=after.running,
        waiting=after.waiting,
    )


def _percentiles(before: TimeHistogram, after: TimeHistogram) -> tuple[float, float, float] | None:
    old_counts = before.counts if before.bounds_ms == after.bounds_ms else (0,) * len(after.counts)
    counts = [max(0, new - old) for old, new in zip(old_counts, after.counts, strict=True)]
    if not sum(counts):
        return None
    p50, p95, p99 = (quantile(after.bounds_ms, counts, share) for share in (0.5, 0.95, 0.99))
    return p50, p95, p99


def quantile(bounds_ms: tuple[float, ...], counts: Iterable[int], share: float) -> float:
    """Return a quantile in milliseconds, like Prometheus's histogram_quantile.

    It interpolates linearly within a bucket; above the last bound it returns that bound.
    """
    counts = tuple(counts)
    rank, below = share * sum(counts), 0
    for i, number in enumerate(counts[: len(bounds_ms)]):
        if number and below + number >= rank:
            low = bounds_ms[i - 1] if i else 0.0
            return round(low + (bounds_ms[i] - low) * (rank - below) / number, 2)
        below += number
    return bounds_ms[-1]
