"""Settings of a process that is only an engine host: libraries' variables, and low-priority threads.

Imports nothing of the engine.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# torch's idle threads would spin for milliseconds, on the cores that the CPU library's threads use.
SPIN_COUNT = "1000"
# Increments of Linux's "nice": a thread of priority one higher gets three times the share of a contended core. With more increments, a standby on a
# machine that is never idle would not be ready within a minute.
_STEPS_BACK = 5


def configure_process() -> None:
    """Set environment variables that libraries read when they are imported, before anything else.

    Only for a process that is nothing but an engine host. Numpy gets no threads: nothing computes with it.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def at_low_priority(work: Callable[[], T]) -> T:
    """Call `work` in a short-lived thread of lower priority; threads that serve later keep the process's.

    Raises its errors.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        # there a thread has a separate priority, which only a privileged one may raise again
        if sys.platform == "linux":
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + _STEPS_BACK))
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="preparation", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
