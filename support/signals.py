"""Which signals end a process of ours in order, and what SIGHUP means: what it then does, and what a second one means, its own room decides.

SIGHUP comes when the terminal is closed, and by itself would end a site without a word, its weights left in shared memory: that is a stop. Sent by
anybody else it is what `systemctl reload` sends, and never one.
"""

import asyncio
import os
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminal:
    """The terminal that this process was started from, if any. A process that should outlive it ignores SIGHUP from the start (`nohup`)."""

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
