"""Priority classes of isolates: they follow from the CPU time of answers, and are set in the kernel."""

import asyncio
import ctypes
import os
import platform
import signal
import struct
import subprocess
import time

import pytest

from pilotlight.functions.host.response_stream import StreamThrottle
from pilotlight.functions.sandbox.priority import (
    OWN_NICE,
    PIECE_BYTES,
    PROMPT_NICE,
    PROMPT_SLICE_NS,
    PROVEN,
    YIELD_NICE,
    CpuHistory,
    KernelCalls,
    PriorityClass,
    apply_priority,
    cpu_s,
)
from tests.functions.conftest import ServedMaker

HONOURS_SLICES = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 12)
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def used(cpu_history: CpuHistory, *, answers: int, cost_s: float, began: float = 100.0, every_s: float = 0.05) -> float:
    """Record answers of the given cost, one every `every_s`; return the time of the last one."""
    for index in range(answers):
        cpu_history.answered()
        cpu_history.spent(cost_s, began + index * every_s)
    return began + answers * every_s


def test_who_answers_with_little_work_is_prompt_only_after_some_answers() -> None:
    cpu_history = CpuHistory()
    used(cpu_history, answers=PROVEN - 1, cost_s=0.0005)
    assert cpu_history.priority_class is PriorityClass.NORMAL
    used(cpu_history, answers=1, cost_s=0.0005, began=101.0)
    assert cpu_history.priority_class is PriorityClass.INTERACTIVE


def test_who_computes_in_one_go_gives_way_at_once_however_good_it_was_and_comes_back_by_answering() -> None:
    cpu_history = CpuHistory()
    now = used(cpu_history, answers=100, cost_s=0.0005)
    cpu_history.spent(0.06, now)
    assert cpu_history.priority_class is PriorityClass.BACKGROUND
    used(cpu_history, answers=200, cost_s=0.0005, began=now + 1.0)
    assert cpu_history.priority_class is PriorityClass.INTERACTIVE


def test_who_works_hard_for_every_answer_gives_way_though_none_takes_long() -> None:
    cpu_history = CpuHistory()
    used(cpu_history, answers=40, cost_s=0.03, every_s=0.1)
    assert cpu_history.priority_class is PriorityClass.BACKGROUND


def test_who_needs_most_of_a_core_for_many_cheap_answers_does_not_come_first() -> None:
    cpu_history = CpuHistory()
    for look in range(40):
        for _ in range(50):
            cpu_history.answered()
        cpu_history.spent(0.045, 100.0 + look * 0.05)
    assert cpu_history.priority_class is PriorityClass.NORMAL


@pytest.mark.parametrize(
    ("size", "priority_class"),
    [(1, PriorityClass.BACKGROUND), (PIECE_BYTES // 4, PriorityClass.INTERACTIVE)],
)
def test_pieces_of_a_stream_count_by_their_bytes(size: int, priority_class: PriorityClass) -> None:
    cpu_history = CpuHistory()
    cpu_history.answered()
    for look in range(200):
        for _ in range(5):
            cpu_history.sent_piece(size)
        cpu_history.spent(0.002, 100.0 + look * 0.05)
    assert cpu_history.priority_class is priority_class


def test_a_successor_on_probation_gives_way_until_it_has_answered() -> None:
    cpu_history = CpuHistory(is_on_probation=True)
    assert cpu_history.priority_class is PriorityClass.BACKGROUND
    used(cpu_history, answers=PROVEN, cost_s=0.0005)
    assert cpu_history.priority_class is PriorityClass.INTERACTIVE


@pytest.mark.skipif(not HONOURS_SLICES, reason="Linux honours time slices since 6.12")
async def test_the_kernel_gets_the_high_and_the_low_priority_classes(make_served: ServedMaker) -> None:
    # an isolate with low priority is slow on a busy machine
    async with make_served(limits={"blocked_s": 20.0}) as served:
        served.add(
            """
            import time
            from workers import WorkerEntrypoint, Response

            class Default(WorkerEntrypoint):
                async def fetch(self, request):
                    if request.url.endswith("/compute"):
                        began = time.process_time()
                        while time.process_time() - began < 0.25:
                            pass
                    return Response("well")
            """
        )
        own = OWN_NICE
        first = own + PROMPT_NICE if own == 0 and os.getuid() == 0 else own
        computing = asyncio.create_task(served.get("/compute"))
        pool = served.functions.pools["f"]
        yielding = min(19, own + YIELD_NICE)
        while (
            not pool.isolates.living
            or pool.isolates.living[0].process.child is None
            or _nice(pool.isolates.living[0].process.child.pid) != yielding
        ):
            assert not computing.done()
            await asyncio.sleep(0.005)
        await computing
        child = pool.isolates.living[0].process.child
        async with asyncio.timeout(60):
            while _scheduled(child.pid) != (first, PROMPT_SLICE_NS):
                await served.get("/")
                await asyncio.sleep(0.01)


@pytest.mark.process
@pytest.mark.skipif(not HONOURS_SLICES, reason="Linux honours time slices since 6.12")
def test_the_loop_itself_is_reported_and_its_children_are_as_usual() -> None:
    apply_priority(0, PriorityClass.INTERACTIVE)
    try:
        assert _scheduled(0)[1] == PROMPT_SLICE_NS
        child = os.fork()
        if child == 0:
            os._exit(0 if _scheduled(0)[1] != PROMPT_SLICE_NS and os.getpriority(os.PRIO_PROCESS, 0) >= 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        apply_priority(0, PriorityClass.NORMAL)
    assert _scheduled(0)[1] != PROMPT_SLICE_NS


@pytest.mark.parametrize(
    ("own_nice", "pid", "of", "slices", "is_for_all"),
    [
        (0, 7, PriorityClass.INTERACTIVE, [(7, PROMPT_NICE, PROMPT_SLICE_NS)], False),
        (0, 7, PriorityClass.NORMAL, [(7, 0, 0)], True),
        (0, 7, PriorityClass.BACKGROUND, [(7, YIELD_NICE, 0)], True),
        (0, 0, PriorityClass.NORMAL, [(0, 0, 0)], False),  # this thread only
        (3, 7, PriorityClass.INTERACTIVE, [(7, 3, PROMPT_SLICE_NS)], True),  # no priority above the site's own
        (18, 7, PriorityClass.BACKGROUND, [(7, 19, 0)], True),
    ],
)
def test_a_class_is_a_nice_value_and_a_slice_of_a_process_and_all_that_it_has_forked(
    own_nice: int, pid: int, of: PriorityClass, slices: list[object], is_for_all: bool
) -> None:
    told: list[object] = []
    groups: list[object] = []
    kernel = KernelCalls(
        lambda pid: os.SCHED_OTHER | os.SCHED_RESET_ON_FORK,
        lambda *asked: told.append(asked),
        lambda *asked: groups.append(asked),
    )
    apply_priority(pid, of, own_nice, kernel)
    assert told == slices
    assert groups == ([(os.PRIO_PGRP, pid, slices[0][1])] if is_for_all else [])  # type: ignore[index]


def test_what_the_site_may_not_do_is_left_and_so_is_what_its_starter_has_decided() -> None:
    told: list[object] = []

    def refuse(*asked: object) -> None:
        told.append(asked)
        raise PermissionError

    kernel = KernelCalls(lambda pid: os.SCHED_OTHER, refuse, refuse)
    apply_priority(7, PriorityClass.INTERACTIVE, 0, kernel)
    assert told == [(7, PROMPT_NICE, PROMPT_SLICE_NS), (7, 0, PROMPT_SLICE_NS)], "the time slice is still tried"
    told.clear()
    apply_priority(7, PriorityClass.INTERACTIVE, 0, kernel._replace(policy=lambda pid: os.SCHED_RR))
    assert told == []


def test_the_cpu_time_of_another_process_is_read_to_the_nanosecond() -> None:
    before = time.process_time()
    assert before <= cpu_s(os.getpid()) <= time.process_time()
    with pytest.raises(OSError, match="Invalid"):
        cpu_s(2**22 + 1)  # higher than any possible pid


@pytest.mark.process
@pytest.mark.skipif(OWN_NICE >= 19, reason="the site already has the lowest priority")
def test_what_a_process_has_forked_gives_way_with_it() -> None:
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]  # the shell's child is killed below
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as started:
        assert started.stdout is not None
        forked = int(started.stdout.readline())
        apply_priority(started.pid, PriorityClass.BACKGROUND)
        assert [_nice(pid) for pid in (started.pid, forked)] == [min(19, OWN_NICE + YIELD_NICE)] * 2
        assert _nice(os.getpid()) == OWN_NICE
        os.killpg(started.pid, signal.SIGKILL)


async def test_a_shared_pace_is_kept_by_all_together_after_a_short_burst() -> None:
    pace, loop = StreamThrottle(1000.0), asyncio.get_running_loop()
    began = loop.time()

    async def send() -> None:
        for _ in range(10):
            await pace.take(10)

    await asyncio.gather(send(), send())
    assert (
        loop.time() - began >= 200 / 1000 - 0.005 - 0.01
    )  # 200 bytes at 1,000 per second, less the burst of 4 ms and a tolerance


def _nice(pid: int) -> int | None:
    return os.getpriority(os.PRIO_PROCESS, pid) if pid > 0 else None


def _scheduled(pid: int) -> tuple[int, int]:
    """Return a process's nice value and time slice in ns."""
    buffer = bytearray(56)
    address = (ctypes.c_char * 56).from_buffer(buffer)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], pid, address, 56, 0) == 0
    _, _, _, nice, _, slice_ns = struct.unpack("=IIQiIQ", buffer[:32])
    return nice, slice_ns
