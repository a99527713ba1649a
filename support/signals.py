"""Signals that stop a process or make it reload.
The caller decides what a stop, or a second one, does.

The kernel sends SIGHUP when the terminal is closed, which would end a site at once and leave its weights in shared memory. So this counts as a stop.
From any other sender, as `systemctl reload`, it means reload.
"""

import asyncio
import os
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminal:
    """The terminal that this process was started from, if any.
    A process that should outlive it ignores SIGHUP from the start (`nohup`)."""

    def __init__(self) -> None:
        self._ends_us = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    @property
    def is_gone(self) -> bool:
        return self._ends_us and not _has_terminal()


def follow_signals(stop: Callable[[], None], reload: Callable[[], None]) -> None:
    """Call back in the running event loop."""
    loop, terminal = asyncio.get_running_loop(), Terminal()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: stop() if terminal.is_gone else reload())


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
