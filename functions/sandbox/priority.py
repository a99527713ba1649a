"""Scheduling priority of functions, the runtime and engines that share cores.

An isolate that answers its requests with little CPU time gets short time slices, with which it preempts long computations when a request arrives
(EEVDF honours slices since Linux 6.12; earlier kernels ignore them). An isolate that computes for long gets a lower priority. Limits are enforced
elsewhere.

Isolates stay in the site's session: where the kernel divides cores among sessions first (`sched_autogroup_enabled`, sched(7)), nice values and slices
have an effect only inside one session. Beside a busy loop in another session, a neighbour's p99 was 3.0 times that of a quiet machine; in the site's
session it was 0.9 times.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from pilotlight.functions.sandbox.confinement import system

# A process that wakes up while another process of its class computes waits until the next tick (4 ms at 250 Hz), unless its slice is shorter than the
# slice of that process (1.4 ms on two cores). With the kernel's shortest slice, 0.1 ms, an answer takes more than one slice, and the computing
# process then runs to the tick: beside two busy loops the runtime's thread waited 346 ms of 8 s, but 134 ms with 0.7 ms.
PROMPT_SLICE_NS = 700_000
MAY_RETURN = os.geteuid() == 0  # only root can raise a priority again after it was lowered
OWN_NICE = os.getpriority(os.PRIO_PROCESS, 0)  # the priority with which the site was started
# Added to the nice value of INTERACTIVE isolates, if permitted. Without it a computing process that got too little time recently runs before them.
PROMPT_NICE = -5
YIELD_NICE = 10
HALF_S = 1.0  # half-life of observations
PROVEN = 5  # answers after which an isolate is no longer on probation
PIECE_BYTES = (
    1 << 10
)  # bytes of a stream or a WebSocket that count as one answer, so that many tiny chunks gain no priority
PROMPT_S = 0.005  # CPU time per answer, or per PIECE_BYTES of a stream; an isolate that uses more is not INTERACTIVE
PROMPT_SHARE = 0.25  # share of a core; an isolate that uses more is not INTERACTIVE
YIELD_S = 0.02
YIELD_AT_ONCE_S = 0.05  # an isolate that used more CPU time since its last answer is BACKGROUND, whatever its history


class KernelCalls(NamedTuple):
    """The calls that read and set the scheduling of processes."""

    policy: Callable[[int], int] = lambda pid: os.sched_getscheduler(pid)  # only Linux has it
    set_slice: Callable[[int, int, int], None] = system.set_slice  # pid, nice value, slice in ns
    set_priority: Callable[[int, int, int], None] = os.setpriority  # kind of `id`, id, nice value


KERNEL = KernelCalls()


class PriorityClass(Enum):
    INTERACTIVE = "prompt"
    NORMAL = "usual"
    BACKGROUND = "yielding"


class CpuHistory:
    """The recent CPU time of an isolate per answer, which determines its priority class."""

    def __init__(self, *, is_on_probation: bool = False) -> None:
        """`is_on_probation` starts the isolate with background priority, until it has proven itself.
        Callers set it if another isolate of the function computes for long or has ended badly."""
        self._is_on_probation = is_on_probation
        self.num_answers = 0.0  # in total
        self._answers = 0.0  # decays with a half-life of HALF_S
        self._spent_s = 0.0  # decays with a half-life of HALF_S
        self._since_answer_s = 0.0
        self._seen_at = 0.0

    def answered(self, share: float = 1.0) -> None:
        """Count an answer, or a share of one."""
        self.num_answers += share
        self._answers += share
        self._since_answer_s *= 1.0 - share

    def sent_piece(self, size: int) -> None:
        """Count a chunk of a stream as a share of an answer, by its size."""
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
        # `_spent_s` converges to this sum at a steady use of PROMPT_SHARE of a core
        is_modest = self._spent_s < PROMPT_SHARE * HALF_S / math.log(2.0)
        return PriorityClass.INTERACTIVE if cost_s < PROMPT_S and is_modest else PriorityClass.NORMAL


def apply_priority(
    pid: int, priority_class: PriorityClass, own_nice: int = OWN_NICE, kernel: KernelCalls = KERNEL
) -> None:
    """Set the scheduling of a process with all its threads; pid 0 is the calling thread.
    Settings that are not permitted are skipped: without root, a priority cannot be raised, even to undo an earlier change."""
    if kernel.policy(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return  # the operator chose another scheduler for the site
    nice, slice_ns = own_nice, 0
    if priority_class is PriorityClass.BACKGROUND:
        nice = min(19, nice + YIELD_NICE)
    if priority_class is PriorityClass.INTERACTIVE:
        slice_ns = PROMPT_SLICE_NS
        if nice == 0:  # the kernel resets forked processes only to 0
            with suppress(OSError):
                return kernel.set_slice(pid, nice + PROMPT_NICE, slice_ns)
    with suppress(OSError):
        kernel.set_slice(pid, nice, slice_ns)
        if pid:
            kernel.set_priority(os.PRIO_PGRP, pid, nice)  # the whole process group


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process with all its threads has used. Raises OSError if it is gone."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


_CPUCLOCK_SCHED = 2  # from include/linux/posix-timers.h; the clock id is made as in clock_getcpuclockid
