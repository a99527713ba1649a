"""A process that is an engine host's alone: what libraries read of it, and threads of lower priority. Imports nothing of the engine."""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# torch's idle threads would look for work for milliseconds, on the cores that the CPU library's threads compute on.
SPIN_COUNT = "1000"
# Steps of Linux's "nice": a thread of one above has three times this one's share of a core they both want. More steps, and a standby of a
# machine that is never idle would not be ready within a minute.
_STEPS_BACK = 5


def configure_process() -> None:
    """Set what libraries read when they are imported, before anything else in a process that is an engine host's alone. Numpy gets no threads of
    its own: nothing there computes with it."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def at_low_priority(work: Callable[[], T]) -> T:
    """Call `work` in a thread of lower priority that ends with it: those that serve later keep the process's priority. Raises what it raises."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        # there a thread has a priority of its own, which only a privileged one may raise again
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
