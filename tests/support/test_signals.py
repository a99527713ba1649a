"""Signals that stop a process, and signals that do not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.support import signals

ROOT = Path(__file__).parents[2]
# Writes the effect of each signal to a pipe, and ends after a stop.
FOLLOWER = """
import asyncio, os, sys
from pilotlight.support.signals import follow_signals
say = int(sys.argv[1])
async def main():
    stop = asyncio.Event()
    follow_signals(stop.set, lambda: os.write(say, b"reload\\n"), 1.0)
    os.write(say, b"ready\\n")
    await stop.wait()
    os.write(say, b"stop\\n")
asyncio.run(main())
"""
# Runs FOLLOWER in a terminal, requests a reload, then closes the terminal.
IN_A_TERMINAL = f"""
import os, pty, signal, sys
told, say = os.pipe()
pid, terminal = pty.fork()
if pid == 0:
    os.set_inheritable(say, True)
    os.execv(sys.executable, [sys.executable, "-c", {FOLLOWER!r}, str(say)])
os.close(say)
said = os.fdopen(told)
print(said.readline(), end="")
os.kill(pid, signal.SIGHUP)
print(said.readline(), end="")
os.close(terminal)
print(said.readline(), end="", flush=True)
os.kill(pid, signal.SIGTERM)
"""


@pytest.mark.process
def test_a_closed_terminal_is_a_stop_and_any_other_hangup_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TERMINAL], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.split() == ["ready", "reload", "stop"]


@pytest.mark.process
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_process_without_a_terminal_is_stopped_by_no_hangup_and_no_order_to_workers(stop: signal.Signals) -> None:
    told, say = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(say)], cwd=ROOT, pass_fds=(say,), start_new_session=True
    )
    os.close(say)
    with process, os.fdopen(told) as said:
        assert said.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGHUP)
        assert said.readline() == "reload\n"
        process.send_signal(stop)
        assert said.readline() == "stop\n"
    assert process.returncode == 0


# Gets signals at its start, which it follows later.
STARTING = """
import asyncio, os, signal, sys
from pilotlight.support.signals import begin_server, follow_signals, release_signals
say = int(sys.argv[1])
begin_server()
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGUSR2)
async def main():
    stop = asyncio.Event()
    follow_signals(stop.set, lambda: os.write(say, b"reload\\n"), 1.0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: os.write(say, b"replace\\n"))
    await asyncio.sleep(0.1)
    os.write(say, b"ready\\n")
    release_signals()
    await stop.wait()
asyncio.run(main())
"""


@pytest.mark.process
def test_a_hangup_at_the_start_is_followed_once_the_process_serves() -> None:
    told, say = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, str(say)], cwd=ROOT, pass_fds=(say,), start_new_session=True
    )
    os.close(say)
    with process, os.fdopen(told) as said:
        first, *others = [said.readline() for _ in range(3)]
        process.terminate()
    assert (first, sorted(others)) == ("ready\n", ["reload\n", "replace\n"])
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("handler", "had_one", "has_one", "is_gone"),
    [
        (signal.SIG_DFL, True, False, True),
        (signal.SIG_DFL, True, True, False),
        (signal.SIG_DFL, False, False, False),  # a service without a terminal
        (signal.SIG_IGN, True, False, False),  # nohup: the process outlives its terminal
    ],
)
def test_a_terminal_is_gone_where_there_was_one_that_the_process_was_to_end_with(
    handler: signal.Handlers, had_one: bool, has_one: bool, is_gone: bool
) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        answers = iter((had_one, has_one))
        assert signals.Terminal(lambda: next(answers)).is_gone is is_gone
    finally:
        signal.signal(signal.SIGHUP, before)
