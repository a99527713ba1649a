"""The memory that is available on this machine, or in this container.

Reads Linux's files; returns None on other systems."""

from pathlib import Path

GIB = 1 << 30


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that are available without swapping.
    They are the kernel's estimate, or less if a container has a lower limit; None if unknown."""
    machine = _statistics(proc / "meminfo").get("MemAvailable:")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:  # the file contains "max": no limit
        return machine
    # The container's use includes cached pages of files. When memory is needed, the kernel frees those that were not used lately.
    droppable = _statistics(cgroup / "memory.stat").get("inactive_file", 0)
    left = max(0, limit - used + droppable)
    return left if machine is None else min(machine, left)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


def _statistics(path: Path) -> dict[str, int]:
    """Return the numbers in a file with lines of a name, a number and, if it is not bytes, the unit kB."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) << (10 if row[2:] else 0) for row in rows if len(row) == 2 or row[2:] == ["kB"]}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
