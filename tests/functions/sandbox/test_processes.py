"""Facts about processes from the kernel: memory, parents and children, and whether they live."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pilotlight.functions.sandbox.processes import descendants, has_ended, memory_mib, parent_of, pid_of

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; print('ready', flush=True); sys.stdin.read()"])
child.wait()
"""


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process with one child; both end when standard input closes."""
    command = [sys.executable, "-S", "-c", FAMILY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        assert started.stdout.readline() == b"ready\n"
        yield started
        started.stdin.close()


@pytest.mark.process
def test_a_family_is_found_by_its_oldest_and_each_knows_its_parent(parent: "subprocess.Popen[bytes]") -> None:
    (child,) = descendants(parent.pid)
    assert {parent.pid, child} <= descendants(os.getpid())
    assert (parent_of(child), parent_of(parent.pid), descendants(child)) == (parent.pid, os.getpid(), set())


@pytest.mark.process
def test_a_descriptor_of_a_process_says_which_it_is_and_whether_it_lives() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
        pidfd = os.pidfd_open(started.pid)
        assert (pid_of(pidfd), has_ended(pidfd), memory_mib(started.pid)) == (started.pid, False, 0)
        started.kill()
        started.wait()
    assert has_ended(pidfd)
    assert pid_of(pidfd) in (-1, 0)
    os.close(pidfd)
    assert (memory_mib(started.pid), parent_of(started.pid), descendants(started.pid)) == (0, None, set())


def test_what_is_no_process_has_no_parent_and_no_name() -> None:
    assert (parent_of(0), parent_of(-1), pid_of(1), pid_of(1 << 20)) == (0, None, 0, 0)


def test_a_processs_own_memory_is_counted_in_mebibytes() -> None:
    before = memory_mib(os.getpid())
    held = bytearray(b"x" * (64 << 20))
    assert before + 56 <= memory_mib(os.getpid()) <= before + 80
    del held
