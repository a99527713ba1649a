"""Which signals end a process in order."""

import signal
import subprocess
import sys

import pytest

SAY = "from wire.signals import stop_signals; print(*(number.name for number in stop_signals()))"


@pytest.mark.parametrize(("before", "expected"), [("", "SIGTERM SIGINT SIGHUP"), ("trap '' HUP; ", "SIGTERM SIGINT")])
def test_a_closed_terminal_is_a_stop_unless_it_is_to_be_outlived(before: str, expected: str) -> None:
    trapped = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what a shell started from here begins with
    try:
        command = ["sh", "-c", f'{before}exec "$0" -c "$1"', sys.executable, SAY]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGHUP, trapped)
    assert done.stdout.strip() == expected
