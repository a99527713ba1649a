"""Counters and histograms by their labels, and the text that Prometheus scrapes (exposition format 0.0.4), as prometheus_client writes it.

That library takes 27 ms to import, a quarter of what a site may take to start, for a server and a push gateway that nobody here has use for; tests
hold this file to its bytes. One event loop writes and reads, so nothing is locked. Refuses to know what is counted.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Literal, Protocol

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]  # values, in the order of the names that the series was made with
Kind = Literal["counter", "gauge", "histogram"]


class Series(Protocol):
    def lines(self) -> Iterator[str]:
        """Its part of a scrape, each line with its end."""


def scrape(series: Iterable[Series]) -> bytes:
    return "".join(line for one in series for line in one.lines()).encode()


class Counter:
    """What only grows, for each combination of labels that has been counted."""

    def __init__(self, name: str, about: str, label_names: Sequence[str] = ()) -> None:
        """`name` without the `_total` that its samples end in."""
        self._name, self._about, self._label_names = name, about, label_names
        self._values: dict[Labels, float] = {}
        self._births = _Births(name, about, label_names)

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        if labels not in self._values:
            self._births.note(labels)
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterator[str]:
        yield from Samples(
            f"{self._name}_total", self._about, "counter", self._label_names, self._values.items()
        ).lines()
        yield from self._births.lines()


class Histogram:
    """How often a value was at most each of some bounds; without labels it is there before its first value."""

    def __init__(self, name: str, about: str, label_names: Sequence[str] = (), *, bounds: Sequence[float]) -> None:
        self._name, self._about, self._label_names = name, about, label_names
        self._bounds = (*map(float, bounds), inf)
        self._counts: dict[Labels, list[int]] = {}  # of each bucket alone
        self._sums: dict[Labels, float] = {}
        self._births = _Births(name, about, label_names)
        if not label_names:
            self._begin(())

    def observe(self, labels: Labels, value: float) -> None:
        if labels not in self._counts:
            self._begin(labels)
        self._counts[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._about, "histogram")
        for labels, counts in self._counts.items():
            pairs = list(zip(self._label_names, labels, strict=True))
            for bound, count in zip(self._bounds, accumulate(counts), strict=True):
                yield _line(f"{self._name}_bucket", [*pairs, ("le", number(bound))], count)
            yield _line(f"{self._name}_count", pairs, sum(counts))
            yield _line(f"{self._name}_sum", pairs, self._sums[labels])
        yield from self._births.lines()

    def _begin(self, labels: Labels) -> None:
        self._counts[labels] = [0] * len(self._bounds)
        self._sums[labels] = 0.0
        self._births.note(labels)


class Samples:
    """Values that somebody else holds, as they are when they are read."""

    def __init__(
        self, name: str, about: str, kind: Kind, label_names: Sequence[str], values: Iterable[tuple[Labels, float]]
    ) -> None:
        """`name` as it is written: a counter's ends in `_total`."""
        self._name, self._about, self._kind, self._label_names, self._values = name, about, kind, label_names, values

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._about, self._kind)
        for labels, value in self._values:
            yield _line(self._name, zip(self._label_names, labels, strict=True), value)


class _Births:
    """Since when each combination of labels has been counted; nothing until there is one."""

    def __init__(self, name: str, about: str, label_names: Sequence[str]) -> None:
        self._name, self._about, self._label_names = f"{name}_created", about, label_names
        self._at: dict[Labels, float] = {}

    def note(self, labels: Labels) -> None:
        self._at[labels] = time.time()

    def lines(self) -> Iterator[str]:
        if self._at:
            yield from Samples(self._name, self._about, "gauge", self._label_names, self._at.items()).lines()


def _head(name: str, about: str, kind: Kind) -> Iterator[str]:
    escaped = about.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {escaped}\n"
    yield f"# TYPE {name} {kind}\n"


def _line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    written = ",".join(f'{label}="{_escaped(text)}"' for label, text in sorted(labels))
    return f"{name}{{{written}}} {number(value)}\n" if written else f"{name} {number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """As Go writes a float: shortest, with an exponent from a million on."""
    value = float(value)
    if value != value:
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > 6:
        digits = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{digits}e+{dot - 1:02d}"
    return text
