"""Priority of functions, the runtime and engines on shared cores, as kernel scheduling settings.

A priority class is earned: an isolate that answers its requests with little CPU time gets short slices, with which it interrupts long computations
when a request arrives (EEVDF honours slices since Linux 6.12; earlier kernels ignore them); one that computes for long yields. Limits are enforced
elsewhere.

Isolates stay in the site's session: where the kernel shares cores among sessions first (`sched_autogroup_enabled`, sched(7)), nice values and slices
count inside one session only. Beside a loop in its own session a neighbour's p99 was 3.0 times the quiet one, in the site's session 0.9.
"""

import math
import os
import time
from contextlib import suppress
from enum import Enum

from pilotlight.functions.host.confinement import system

# A process that wakes waits for a computing one of the same class until the next tick, 4 ms at 250 Hz; one with a shorter slice than that one's
# (1.4 ms on two cores) does not. The shortest that the kernel takes, 0.1 ms, ends in the middle of an answer, and then the computing one runs to the
# tick: beside two loops the runtime's thread waited for 346 ms of 8 s, with 0.7 ms for 134.
PROMPT_SLICE_NS = 700_000
MAY_RETURN = os.geteuid() == 0  # to normal priority, for isolates that have proven themselves
OWN_NICE = os.getpriority(os.PRIO_PROCESS, 0)  # the priority with which the site was started
PROMPT_NICE = -5  # if the site may: otherwise a computing process that got too little time recently comes first
YIELD_NICE = 10
HALF_S = 1.0  # half-life of observations
PROVEN = 5  # answers after which an isolate leaves probation
PIECE_BYTES = (
    1 << 10
)  # so many bytes of a stream or a WebSocket count as one answer: single bytes would gain priority unfairly
PROMPT_S = 0.005  # of CPU time for one answer, or PIECE_BYTES of a stream
PROMPT_SHARE = 0.25  # of a core; an isolate that uses more is not served first
YIELD_S = 0.02
YIELD_AT_ONCE_S = 0.05  # without an answer, regardless of its history


class PriorityClass(Enum):
    INTERACTIVE = "prompt"
    NORMAL = "usual"
    BACKGROUND = "yielding"


class CpuHistory:
    """The recent CPU time of one isolate's answers."""

    def __init__(self, *, is_on_probation: bool = False) -> None:
        """Start with the default priority, or a lower one on probation.

        `is_on_probation`: another isolate of the function computes for long or was just ended, so this one yields until it has proven itself.
        """
        self._is_on_probation = is_on_probation
        self.num_answers = 0.0  # ever
        self._answers = 0.0  # lately
        self._spent_s = 0.0  # lately
        self._since_answer_s = 0.0
        self._seen_at = 0.0

    def answered(self, share: float = 1.0) -> None:
        """Count an answer, or a share of one."""
        self.num_answers += share
        self._answers += share
        self._since_answer_s *= 1.0 - share

    def sent_piece(self, size: int) -> None:
        """Count a piece of a stream by its bytes."""
        self.answered(min(1.0, size / PIECE_BYTES))

    def spent(self, seconds: float, now: float) -> None:
        fading = 0.5 ** ((now - self._seen_at) / HALF_S) if self._seen_at else 1.0
        self._seen_at = now
        self._answers *= fading
        self._spent_s = self._spent_s * fading + seconds
        self._since_answer_s = self._since_answer_s * fading + seconds

    @property
    def priority_class(self) -> PriorityClass:
        cost_s = self._spent_s / max(self._answers, 1.0)
        if self._since_answer_s > YIELD_AT_ONCE_S or cost_s > YIELD_S:
            return PriorityClass.BACKGROUND
        if self.num_answers < PROVEN:
            return PriorityClass.BACKGROUND if self._is_on_probation else PriorityClass.NORMAL
        is_modest = self._spent_s < PROMPT_SHARE * HALF_S / math.log(2.0)  # the sum for a steady share
        return PriorityClass.INTERACTIVE if cost_s < PROMPT_S and is_modest else PriorityClass.NORMAL


def apply_priority(pid: int, priority_class: PriorityClass) -> None:
    """Set the scheduling of a process with all its threads (0 for this thread).
    Settings that the site may not make are skipped: without root, priority cannot be raised, and not restored after it was lowered."""
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return  # the site was started with other settings
    nice, slice_ns = OWN_NICE, 0
    if priority_class is PriorityClass.BACKGROUND:
        nice = min(19, nice + YIELD_NICE)
    if priority_class is PriorityClass.INTERACTIVE:
        slice_ns = PROMPT_SLICE_NS
        if nice == 0:  # forked processes are reset to 0
            with suppress(OSError):
                return system.set_slice(pid, nice + PROMPT_NICE, slice_ns)
    with suppress(OSError):
        system.set_slice(pid, nice, slice_ns)
        if pid:
            os.setpriority(os.PRIO_PGRP, pid, nice)  # its threads and forked processes


def cpu_s(pid: int) -> float:
    """CPU seconds that a process with all its threads has used, to the nanosecond.
    Raises OSError if it is gone."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


_CPUCLOCK_SCHED = 2  # include/linux/posix-timers.h: the clock of another process, as clock_getcpuclockid makes it
