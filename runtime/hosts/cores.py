"""The CPU cores of engine hosts, if several hosts of one site compute on a CPU.

Each host gets neighboring cores: on a machine with several sockets, those of one socket where possible, because its memory is near. Libraries that
count cores count only these. Works on Linux; on other systems cores are not divided.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

Cores = frozenset[int]

_NODES = Path("/sys/devices/system/node")


def divided(parts: Sequence[int], nodes: Path = _NODES, allowed: Iterable[int] | None = None) -> list[Cores | None]:
    """Return the cores of each host, in proportion to its ranks (`parts`), neighbors together.

    `allowed` are the cores to divide; None for all of this process. The entries are None if there are fewer cores than ranks, or if the system cannot
    bind processes to cores.
    """
    num_ranks = sum(parts)
    if not hasattr(os, "sched_getaffinity"):
        return [None] * len(parts)
    node_of = _node_of_each(nodes)
    cores = sorted(
        os.sched_getaffinity(0) if allowed is None else allowed, key=lambda core: (node_of.get(core, 0), core)
    )
    if len(cores) < num_ranks:
        return [None] * len(parts)
    bounds = [len(cores) * ranks // num_ranks for ranks in accumulate(parts, initial=0)]
    return [frozenset(cores[start:end]) for start, end in pairwise(bounds)]


def keep_to(pid: int, cores: Cores) -> None:
    """Bind a process to cores. Threads that it starts later inherit them."""
    with suppress(OSError):  # the process has ended already, or a container forbids it
        os.sched_setaffinity(pid, cores)


def _node_of_each(nodes: Path) -> dict[int, int]:
    """Return the memory node of each core."""
    found: dict[int, int] = {}
    for node in nodes.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", (node / "cpulist").read_text()):
                for core in range(int(first), int(last or first) + 1):
                    found[core] = int(node.name.removeprefix("node"))
    return found
