"""Signals that stop a process or make it reload.

The caller decides what a stop, or a second one, does. SIGHUP has two senders. The kernel sends it when the terminal is closed: it counts as a stop,
because by default it would end a site at once and leave its weights in shared memory. From any other sender, such as `systemctl reload`, it means
reload.
"""

import os
import signal
from collections.abc import Callable

from pilotlight.support.service_manager import notify_ready, notify_reloading, notify_stopping

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HELD = (signal.SIGHUP, signal.SIGUSR2)  # those that a running server obeys without ending


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Terminal:
    """The terminal from which this process was started, if any.
    A process that should outlive its terminal ignores SIGHUP from the start (`nohup`)."""

    def __init__(self, has_terminal: Callable[[], bool] = _has_terminal) -> None:
        self._has_terminal = has_terminal
        self._ends_us = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()

    @property
    def is_gone(self) -> bool:
        return self._ends_us and not self._has_terminal()


TERMINAL = Terminal()  # of the process's start, because the terminal may be closed before signals are followed


def begin_server() -> None:
    """Prepare a server's process for signals; call it before long imports.

    Until `follow_signals`, Ctrl-C ends the process without a traceback. Until `release_signals`, reloads wait.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hold_signals()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # blocked by the command line, before it became this server


def hold_signals() -> None:
    """Let the signals in HELD wait, here and in programs that are started from here.

    They would end a program that does not follow them yet."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def release_signals() -> None:
    """Deliver the signals that wait, and those that come later."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def follow_signals(stop: Callable[[], None], reload: Callable[[], object], drain_timeout_s: float) -> None:
    """Call `stop` or `reload` in the running event loop at these signals; ignore SIGUSR2.
    The service manager, if any, is notified, and waits for a drain of `drain_timeout_s`."""
    import asyncio  # imported here: `pilotlight up` follows signals without an event loop

    loop = asyncio.get_running_loop()

    def on_stop() -> None:
        notify_stopping(drain_timeout_s)
        stop()

    def on_hangup() -> None:
        if TERMINAL.is_gone:
            return on_stop()
        notify_reloading()
        reload()
        notify_ready()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    # only routers with workers replace this handler; a signal sent by a program's name reaches other servers, too
    loop.add_signal_handler(signal.SIGUSR2, lambda: None)
