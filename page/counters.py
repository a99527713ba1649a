"""Sums of Prometheus metrics over their labels, for the page."""

import math
from collections import Counter as Tally
from itertools import pairwise

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from pilotlight.page.source import TimeHistogram


def totals_by(metric: Collector, label: str) -> dict[str, int]:
    """Return a counter's sums by the values of one label."""
    totals: Tally[str] = Tally()
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                totals[sample.labels[label]] += int(sample.value)
    return dict(totals)


def total(metric: Counter | Gauge) -> int:
    return sum(
        int(sample.value)
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    )


def times_of(metric: Histogram) -> TimeHistogram:
    """Return the sum of a histogram's children, converted from seconds to ms.
    The result has no bounds if the histogram has no children."""
    at_most: Tally[float] = Tally()
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                at_most[float(sample.labels["le"])] += int(sample.value)
    bounds = sorted(at_most.keys() - {math.inf})
    counts = [more - fewer for fewer, more in pairwise([0, *(at_most[bound] for bound in (*bounds, math.inf))])]
    return TimeHistogram(tuple(1000 * bound for bound in bounds), tuple(counts))
