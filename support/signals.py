"""Which signals end a process of ours in order, and what SIGHUP means: what it then does, and what a second one means, its own room decides.

SIGHUP comes when the terminal is closed, and by itself would end a site without a word, its weights left in shared memory: that is a stop. Sent by
anybody else it is what `systemctl reload` sends, and never one.
"""

import asyncio
import os
import signal
from collections.abc import Callable

from pilotlight.support.service_manager import notify_ready, notify_reloading, notify_stopping

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminal:
    """The terminal that this process was started from, if any. A process that should outlive it ignores SIGHUP from the start (`nohup`)."""

    def __init__(self) -> None:
        self._ends_us = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    @property
    def is_gone(self) -> bool:
        return self._ends_us and not _has_terminal()


def follow_signals(stop: Callable[[], None], reload: Callable[[], object]) -> None:
    """Call back in the running event loop, and tell the service manager, if there is one."""
    loop, terminal = asyncio.get_running_loop(), Terminal()

    def on_stop() -> None:
        notify_stopping()
        stop()

    def on_hangup() -> None:
        if terminal.is_gone:
            return on_stop()
        notify_reloading()
        reload()
        notify_ready()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
