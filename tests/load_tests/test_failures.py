"""Figures of the failure scenarios: first tokens without pauses, spans that overlap, slopes and their noise."""

import random

import pytest

from load_tests.client import StreamTimes
from load_tests.scenarios.cascade import Asked, merged, plot, summary
from load_tests.scenarios.soak import slope
from load_tests.tables.failures import PUBLISHED, cascade


def asked(sent_s: float, ttft_s: float, error: str | None = None) -> Asked:
    times = StreamTimes(
        ttft_s=ttft_s, e2el_s=ttft_s + 1, arrivals_s=[ttft_s, ttft_s + 1], finished=error is None, error=error
    )
    return Asked({}, sent_s, times)


def test_the_parts_of_pauses_that_a_request_met_are_not_part_of_its_wait() -> None:
    request = asked(10.0, 8.0)  # its first token comes at 18
    assert request.first_token_s([]) == 8.0
    assert request.first_token_s([(8.0, 11.0), (14.0, 15.5), (17.0, 30.0), (40.0, 50.0)]) == 8.0 - 1.0 - 1.5 - 1.0


def test_merged_spans_are_ordered_and_do_not_overlap() -> None:
    assert merged([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0), (3.0, 4.0)]) == [(1.0, 4.0), (5.0, 6.0)]


@pytest.mark.parametrize(("ttft_s", "is_in_time"), [(5.0, True), (6.1, False)])
def test_a_first_token_is_in_time_within_twice_the_calm_wait_and_its_pauses(ttft_s: float, is_in_time: bool) -> None:
    calm, late = asked(0.0, 2.0), asked(10.0, ttft_s)
    row = summary([calm, late], [calm], [10.5], [(10.5, 12.5)])
    assert (row["is_in_time"], row["worst_without_pauses_s"]) == (is_in_time, ttft_s - 2.0)
    assert row["failed"] == 0


def test_a_run_is_drawn_and_tabulated_beside_published_figures() -> None:
    calm, cut = asked(0.0, 2.0), asked(10.0, 3.0, error="it was cut")
    row = {
        "setting": "one site",
        "gap_s": 2.0,
        "compared": 1,
        "different": 0,
        **summary([calm, cut], [calm], [10.5], [(10.5, 12.5)]),
    }
    head, ours, *published = cascade({"rows": [row]})
    assert len(head) == len(ours) == len(published[0])
    assert published == list(PUBLISHED)
    assert "one site, 2 s apart" in plot([row])


def test_a_leak_has_a_slope_above_its_noise_and_a_constant_size_has_none() -> None:
    draw = random.Random(1)
    times_s = [10.0 * number for number in range(180)]
    noise = [100 + draw.gauss(0, 1) for _ in times_s]
    steady = slope(times_s, noise)
    leaking = slope(times_s, [value + at_s / 360 for value, at_s in zip(noise, times_s, strict=True)])
    assert steady is not None
    assert leaking is not None
    assert (steady.is_growth, leaking.is_growth) == (False, True)
    assert abs(leaking.per_hour - steady.per_hour - 10.0) < 1e-6
    assert slope(times_s[:3], noise[:3]) is None
