"""Settings of an engine host's process: environment variables of libraries, and low-priority threads.

Imports nothing of the engine.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How often an idle thread of torch spins before it sleeps: by default it spins for milliseconds, on the cores that the CPU library's threads use.
SPIN_COUNT = "1000"
# Increase of Linux's "nice": a thread without it gets three times the share of a contended core. With a larger increase, a standby on a machine that
# is never idle would not be ready within a minute.
_STEPS_BACK = 5


def configure_process() -> None:
    """Set environment variables that libraries read when they are imported. Call it first.

    Only for a process that is nothing but an engine host. Numpy gets one thread, because nothing computes with it. torch does not look for devices of
    other packages, for which it reads the metadata of every installed one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def at_low_priority(work: Callable[[], T]) -> T:
    """Call `work` in a short-lived thread of lower priority, and return its result. Raises its errors.

    Threads that serve later keep the priority of the process.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        # on Linux each thread has its own priority, which only a privileged one may raise again
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
