"""Facts about processes from /proc and process descriptors: memory, parents, descendants, liveness."""

import os
import re
import select
from contextlib import suppress


def memory_mib(pid: int) -> int:
    """Return the private memory of a process in MiB; 0 if it is gone."""
    try:
        status = _read_at_once(f"/proc/{pid}/status")
    except OSError:
        return 0
    return sum(int(size) for size in _OWN_MEMORY.findall(status)) >> 10


_OWN_MEMORY = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)  # without mapped files, which are page cache


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def descendants(pid: int) -> set[int]:
    """Return the living descendants of a process."""
    found: set[int] = set()
    left = [pid]
    while left:
        with suppress(OSError):  # the process has ended
            folder = f"/proc/{left.pop()}/task"
            for thread in os.listdir(folder):
                with suppress(OSError):
                    children = {int(child) for child in _read_at_once(f"{folder}/{thread}/children").split()} - found
                    found |= children
                    left += children
    return found


def _read_at_once(path: str) -> bytes:
    """Return the content of a file of /proc. Without pathlib, all requests wait 30 us instead of 120 us."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 14)
    finally:
        os.close(file)


def pid_of(pidfd: int) -> int:
    """Return the pid of a pidfd in this pid namespace; 0 if the process is not visible here."""
    try:
        lines = _read_at_once(f"/proc/self/fdinfo/{pidfd}").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Pid:")), 0)


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal such as SIGSTOP, or by a debugger."""
    try:
        return _read_at_once(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent; None if the process has ended."""
    if pid <= 0:
        return None if pid == -1 else 0
    try:
        return int(_read_at_once(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except OSError:
        return None
