"""Which cores an engine host computes on, where several hosts of one site compute on a CPU.

Each has a share of cores that lie together: on a machine with several sockets, a socket's, whose memory is near. A library that counts cores then
counts these. Knows Linux; elsewhere nothing is divided.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

Cores = frozenset[int]

_NODES = Path("/sys/devices/system/node")


def divided(parts: Sequence[int], nodes: Path = _NODES) -> list[Cores | None]:
    """Return shares of the cores that this process may use, neighbours together, each as large as its part of `parts`: the ranks of each host. None:
    all, where there are fewer cores than ranks, or no way to say so."""
    num_ranks = sum(parts)
    if not hasattr(os, "sched_getaffinity"):
        return [None] * len(parts)
    node_of = _node_of_each(nodes)
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (node_of.get(core, 0), core))
    if len(cores) < num_ranks:
        return [None] * len(parts)
    bounds = [len(cores) * ranks // num_ranks for ranks in accumulate(parts, initial=0)]
    return [frozenset(cores[start:end]) for start, end in pairwise(bounds)]


def keep_to(pid: int, cores: Cores) -> None:
    """Bind a process that has just been started to cores: threads that it starts later are kept to them as well."""
    with suppress(OSError):  # it has ended already, or a container forbids it
        os.sched_setaffinity(pid, cores)


def _node_of_each(nodes: Path) -> dict[int, int]:
    """Return the memory node of every core."""
    found: dict[int, int] = {}
    for node in nodes.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", (node / "cpulist").read_text()):
                for core in range(int(first), int(last or first) + 1):
                    found[core] = int(node.name.removeprefix("node"))
    return found
