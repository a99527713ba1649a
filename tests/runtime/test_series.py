"""The text of a scrape, beside prometheus_client's of the same observations."""

import random
import time
from math import inf, nan

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from runtime.series import Counter, Histogram, Samples, Series, number, scrape

AWKWARD = ("plain", "", 'a "quoted" one', "back\\slash", "two\nlines", "@org/model:8b", "größer", "{}=,")
BOUNDS = (0.005, 0.1, 1, 2.5, 1024, 1_000_000, 40_960_000)
VALUES = (0.0, 0.005, 0.0050001, 1, 1.5, 2.5, 1023.9, 1e6, 123_456_789.25, 1e16, 1e-7, inf)
ABOUT = 'What it is: "quoted", \\ and\nof two lines'


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.25)


def test_a_scrape_is_what_prometheus_client_writes_of_the_same_observations() -> None:
    dice = random.Random(7)
    registry = prometheus_client.CollectorRegistry()
    their_counter = prometheus_client.Counter("vllm:tokens", ABOUT, ["model_name", "a"], registry=registry)
    their_histogram = prometheus_client.Histogram(
        "site_ms", ABOUT, ["phase", "clock"], registry=registry, buckets=BOUNDS
    )
    their_bare = prometheus_client.Histogram("bare_s", "Bare", registry=registry, buckets=BOUNDS)
    prometheus_client.Gauge("info", ABOUT, ["site"], registry=registry).labels(AWKWARD[2]).set(1)
    counter, histogram = (
        Counter("vllm:tokens", ABOUT, ["model_name", "a"]),
        Histogram("site_ms", ABOUT, ["phase", "clock"], bounds=BOUNDS),
    )
    bare = Histogram("bare_s", "Bare", bounds=BOUNDS)
    series: list[Series] = [counter, histogram, bare, Samples("info", ABOUT, "gauge", ["site"], [((AWKWARD[2],), 1)])]
    assert scrape(series) == prometheus_client.generate_latest(registry), "before anything is observed"
    for _ in range(300):
        labels, value = (dice.choice(AWKWARD), dice.choice(AWKWARD)), dice.choice(VALUES)
        their_counter.labels(*labels).inc(value)
        counter.add(labels, value)
        their_histogram.labels(*labels).observe(value)
        histogram.observe(labels, value)
        their_bare.observe(value)
        bare.observe((), value)
    assert scrape(series) == prometheus_client.generate_latest(registry)


def test_what_was_observed_is_read_back_from_the_text() -> None:
    counter, histogram = Counter("c", "C", ["name"]), Histogram("h", "H", bounds=(1, 2))
    for name in AWKWARD:
        counter.add((name,), 2)
        counter.add((name,))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe((), value)
    families = {family.name: family for family in text_string_to_metric_families(scrape([counter, histogram]).decode())}
    counted = {s.labels["name"]: s.value for s in families["c"].samples if s.name == "c_total"}
    assert counted == dict.fromkeys(AWKWARD, 3.0)
    assert [s.value for s in families["h"].samples if s.name == "h_bucket"] == [2.0, 3.0, 4.0]
    assert [s.value for s in families["h"].samples if s.name in ("h_count", "h_sum")] == [4.0, 12.0]


@pytest.mark.parametrize("value", [*VALUES, -1.0, -1e9, -inf, nan, 999_999.0, 1e22, 5e-324])
def test_numbers_are_written_as_prometheus_client_writes_them(value: float) -> None:
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_a_value_that_somebody_else_holds_is_read_at_each_scrape() -> None:
    held: dict[tuple[str, ...], float] = {}
    samples = Samples("x", "X", "gauge", ["a"], held.items())
    assert scrape([samples]) == b"# HELP x X\n# TYPE x gauge\n"
    held["v",] = 3
    assert scrape([samples]).endswith(b'x{a="v"} 3.0\n')
