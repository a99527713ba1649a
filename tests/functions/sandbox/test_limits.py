"""Charging an isolate's CPU time to requests, and the limit of each measure.

No process runs; the test sets the time.
"""

from typing import Any, cast

import pytest

from pilotlight.functions.host.isolates.isolate_work import CpuMeter, IsolateWork
from pilotlight.functions.sandbox.limits import FunctionLimits, IsolateUsage, first_exceeded
from tests.clock import Clock

LIMITS = FunctionLimits(cpu_ms=200, memory_mib=64, blocked_s=10.0, wall_s=300.0)


@pytest.mark.parametrize(
    ("measure", "limit", "code", "says"),
    [
        ("idle_cpu_s", 0.2, "cpu_time", "while it had no request"),
        ("request_cpu_s", 0.2, "cpu_time", "for one request"),
        ("sockets_cpu_s", 0.2, "cpu_time", "its WebSockets"),
        ("memory_mib", 64, "memory", "65 MiB of memory"),
        ("silent_s", 10.0, "blocked", "blocked its event loop"),
        ("background_s", 300.0, "wall_time", "waitUntil"),
    ],
)
def test_each_measure_has_a_limit_that_it_may_reach(measure: str, limit: float, code: str, says: str) -> None:
    assert first_exceeded(IsolateUsage(**{measure: limit}), LIMITS) is None
    told = first_exceeded(IsolateUsage(**{measure: limit + 1}), LIMITS)
    assert told is not None
    assert (told[1], says in told[0]) == (code, True)


def test_time_is_divided_among_the_requests_that_were_open_at_both_looks() -> None:
    work = IsolateWork()
    meter = CpuMeter(work, LIMITS.sockets_share, 0.0)
    charged = []
    for started, ended in (([1], []), ([2], []), ([], []), ([], [1])):
        for id in started:
            work.begin(id)
        for id in ended:
            work.end(id)
        meter.charge(0.4, 10.0)
        charged.append(dict(work.requests))
    assert charged == [{1: 0.0}, {1: 0.4, 2: 0.0}, {1: pytest.approx(0.6), 2: 0.2}, {2: pytest.approx(0.6)}]
    assert meter.idle_s == 0.0


def test_open_sockets_may_use_half_of_a_core_and_pay_for_more() -> None:
    work = IsolateWork()
    meter = CpuMeter(work, LIMITS.sockets_share, 0.0)
    work.open_sockets = cast("Any", {1, 2})
    meter.charge(0.8, 1.0)
    assert meter.sockets_s == pytest.approx(0.3)
    meter.charge(0.4, 2.0)
    assert meter.sockets_s == pytest.approx(0.2), "0.5 s per second is allowed"
    work.begin(1)
    meter.charge(0.5, 3.0)
    meter.charge(0.9, 4.0)
    assert (work.requests[1], meter.sockets_s) == (pytest.approx(0.45), pytest.approx(0.15))
    work.open_sockets.clear()
    meter.charge(0.1, 5.0)
    assert (meter.sockets_s, meter.idle_s) == (0.0, 0.0)


def test_what_runs_without_a_request_adds_up_until_there_is_one() -> None:
    work = IsolateWork()
    meter = CpuMeter(work, LIMITS.sockets_share, 0.0)
    meter.charge(0.1, 1.0)
    meter.charge_idle(0.2)
    assert meter.idle_s == pytest.approx(0.3)
    work.begin(1)
    meter.charge(0.1, 2.0)
    assert meter.idle_s == 0.0


def test_a_processors_clock_that_goes_back_takes_nothing_back() -> None:
    meter = CpuMeter(IsolateWork(), LIMITS.sockets_share, 0.0)
    assert [meter.spent(total_s) for total_s in (1.0, 0.5, 1.25)] == [1.0, 0.0, 0.25]


def test_background_work_has_its_time_from_its_beginning_while_no_request_is_open() -> None:
    clock = Clock(1000.0)
    work = IsolateWork(clock)
    work.set_background(1)
    clock.now = 1005.0
    assert work.background_s() == 5.0
    work.begin(1)
    assert work.background_s() == 0.0
    assert work.load == 1
    work.end(1)
    clock.now = 1006.0
    work.set_background(2)
    clock.now = 1007.0
    assert work.background_s() == 7.0, "further work does not restart the time"
    work.set_background(-1)
    assert (work.background, work.background_s(), work.idle_since) == (0, 0.0, 1007.0)
    clock.now = 1010.0
    work.set_background(1)
    clock.now = 1011.0
    assert work.background_s() == 1.0
