"""The end of a process whose parent has died, on Linux.

On other systems these functions only check the parent's id.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def notify_at_parents_death(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number.value)


def die_with(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when its parent dies; exit if it has died."""
    notify_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
