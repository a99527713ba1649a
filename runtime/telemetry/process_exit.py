"""Describes how a child process ended: its status, its signal, or the kernel's OOM killer.

The OOM killer is recognized by Linux's counters only.
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def oom_kills(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the number of processes that the OOM killer has ended, or None if unknown.

    Counts in this process's control group if the group has such a counter, else on the whole machine."""
    for file in (*_of_group(cgroup, root), Path("/proc/vmstat")):
        with suppress(OSError, ValueError):
            counts = dict(line.split()[:2] for line in file.read_text().splitlines() if len(line.split()) > 1)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _of_group(cgroup: Path, root: Path) -> list[Path]:
    """Return the files that may count OOM kills in this process's control group (version 2 or 1)."""
    files = []
    with suppress(OSError):
        for line in cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(root / path.lstrip("/") / "memory.events")
            elif controllers == "memory":
                files.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def ending(code: int, oom_kills_before: int | None, count: Callable[[], int | None] = oom_kills) -> str:
    """Return the end of a sentence such as "was ended by SIGKILL".
    `code` is subprocess's return code; `oom_kills_before` is the result of `oom_kills` before the process was started."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    is_for_memory = is_oom_kill(code, oom_kills_before, count)
    return f"was ended by {name}" + (": out of memory, by the kernel's OOM killer" if is_for_memory else "")


def is_oom_kill(code: int, oom_kills_before: int | None, count: Callable[[], int | None] = oom_kills) -> bool:
    """Tell whether the OOM killer ended a process.

    The arguments are those of `ending`."""
    now = count() if code == -signal.SIGKILL and oom_kills_before is not None else None
    return now is not None and oom_kills_before is not None and now > oom_kills_before
