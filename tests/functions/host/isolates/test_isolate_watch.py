"""Measuring one isolate: when it is measured, which requests are charged, and when it is pinged."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import ChannelClosed
from pilotlight.functions.host.isolates.isolate_watch import IsolateWatch
from pilotlight.functions.host.isolates.isolate_work import IsolateWork
from pilotlight.functions.host.isolates.loop_probe import LoopProbe
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.support.time_limits import NO_PAUSES, Pauses
from tests.clock import Clock

LIMITS = FunctionLimits(cpu_ms=200, cpu_total_s=2.0, memory_mib=64, start_s=20.0)


class Process:
    def __init__(self) -> None:
        self.cpu, self.memory = 0.0, 1
        self.spent: list[tuple[float, float]] = []
        self.num_updates = 0
        self.history = SimpleNamespace(spent=lambda seconds, now: self.spent.append((seconds, now)))

    def cpu_s(self) -> float:
        return self.cpu

    def memory_mib(self) -> int:
        return self.memory

    def update_priority(self) -> None:
        self.num_updates += 1


class Pinged:
    """A channel that answers pings only when the test lets it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_pings = 0

    async def ping(self) -> None:
        self.num_pings += 1
        await asyncio.shield(self.answer)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def watched(clock: Clock, pauses: Pauses = NO_PAUSES) -> tuple[IsolateWatch, Process, IsolateWork]:
    process, work = Process(), IsolateWork(clock)
    return IsolateWatch(LIMITS, cast(Any, process), work, clock, pauses), process, work


async def test_an_import_may_take_as_long_as_was_said_whatever_it_computes(clock: Clock) -> None:
    watch, process, _ = watched(clock)
    process.cpu = 1.0
    clock.now += LIMITS.start_s
    assert watch.look_at_start() is None
    clock.now += 0.1
    exceeded = watch.look_at_start()
    assert exceeded is not None
    assert (exceeded[1], "not imported within 20 s" in exceeded[0]) == ("start_time", True)
    assert watch.look(Pinged().ping) is None, "no request is charged for the import"


async def test_a_pause_of_the_site_counts_as_no_silence_of_an_isolate(clock: Clock) -> None:
    watch, _, work = watched(clock, Pauses(0.25))
    for later_s in (0.2, 1000.0, 0.2):  # it was stopped once, perhaps with its whole machine
        clock.now += later_s
        assert watch.look_at_start() is None
    channel = Pinged()
    work.set_background(1)
    for later_s in (0.2, 1000.0, 0.2):
        clock.now += later_s
        assert watch.look(channel.ping) is None
        await asyncio.sleep(0)
    assert watch.probe.silent_s() > 1000.0
    for _ in range(round(5 * LIMITS.blocked_s)):
        clock.now += 0.2
        exceeded = watch.look(channel.ping)
    assert exceeded is not None
    assert exceeded[1] == "blocked"
    watch.probe.close()


async def test_a_spare_isolate_has_the_whole_time_for_its_import(clock: Clock) -> None:
    watch, _, _ = watched(clock)
    clock.now += 1000.0
    watch.begin_import()
    clock.now += LIMITS.start_s
    assert watch.look_at_start() is None
    clock.now += 0.1
    assert watch.look_at_start() is not None


async def test_a_request_is_charged_the_spending_between_two_looks(clock: Clock) -> None:
    watch, process, work = watched(clock)
    work.begin(1)
    assert watch.look(Pinged().ping) is None
    clock.now += 1.0
    process.cpu = 0.2
    assert watch.look(Pinged().ping) is None
    process.cpu = 0.25
    exceeded = watch.look(Pinged().ping)
    assert exceeded is not None
    assert "200 ms of CPU time for one request" in exceeded[0]
    assert process.spent == [(0.0, 1000.0), (0.2, 1001.0), (pytest.approx(0.05), 1001.0)]
    assert process.num_updates == 3
    process.memory = LIMITS.memory_mib + 1
    work.end(1)
    exceeded = watch.look(Pinged().ping)
    assert exceeded is not None
    assert exceeded[1] == "memory"


async def test_one_without_work_is_looked_at_now_and_then_and_what_it_does_adds_up(clock: Clock) -> None:
    watch, process, _ = watched(clock)
    told = []
    for at, cpu in ((0.0, 0.1), (0.1, 5.0), (LIMITS.idle_look_s, 0.2), (2 * LIMITS.idle_look_s + 0.01, 0.21)):
        clock.now, process.cpu = 1000.0 + at, cpu
        exceeded = watch.look_idle()
        told.append(None if exceeded is None else exceeded[1])
    assert told == [None, None, None, "cpu_time"]
    assert len(process.spent) == process.num_updates == 3
    assert process.spent[0] == (0.1, 1000.0)


async def test_one_that_has_computed_for_its_whole_life_is_spent_and_is_asked_no_more(clock: Clock) -> None:
    channel, (watch, process, _) = Pinged(), watched(clock)
    process.cpu = LIMITS.cpu_total_s
    watch.last_look()
    assert (watch.total_s, watch.is_spent) == (LIMITS.cpu_total_s, False)
    assert watch.look(channel.ping) is None
    await asyncio.sleep(0)
    assert channel.num_pings == 1
    watch.probe.close()
    channel, (watch, process, _) = Pinged(), watched(clock)
    process.cpu = LIMITS.cpu_total_s + 0.1
    watch.last_look()
    assert watch.is_spent
    watch.look(channel.ping)
    await asyncio.sleep(0)
    assert channel.num_pings == 0


async def test_a_loop_is_asked_once_until_it_answers_and_its_silence_is_counted_from_then(clock: Clock) -> None:
    channel, probe = Pinged(), LoopProbe(clock)
    assert probe.silent_s() == 0.0
    for later in (0.0, 2.0, 1.5):
        clock.now += later
        probe.begin(channel.ping)
        await asyncio.sleep(0)
    assert (channel.num_pings, probe.silent_s()) == (1, 3.5)
    channel.answer.set_result(None)
    await settle()
    assert probe.silent_s() == 0.0
    channel = Pinged()
    probe.begin(channel.ping)
    await asyncio.sleep(0)
    clock.now += 1.0
    assert (channel.num_pings, probe.silent_s()) == (1, 1.0)
    channel.answer.set_exception(ChannelClosed())
    await settle()
    assert probe.silent_s() == 1.0, "the ping is unanswered"
    probe.close()
    channel = Pinged()
    probe.begin(channel.ping)
    await asyncio.sleep(0)
    probe.close()
    await settle()
    probe.begin(channel.ping)  # the previous ping was answered
    await asyncio.sleep(0)
    assert channel.num_pings == 2
    probe.close()
