"""Limits of a function, and the check of a running isolate.

The check returns the exceeded limit, by how much, and the sentence for the author.

Frozen values with units, set by the site file (sites/site.py, [functions]). Measuring and ending are in isolate_handle.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SOCKETS_SHARE = 0.5  # of a core, which an isolate's open WebSockets may use for as long as they are open


@dataclass(frozen=True)
class FunctionLimits:
    cpu_ms: int = 30_000  # of one request; the isolate's time is divided among the requests it has open
    cpu_total_s: float = 3600.0  # of one isolate, which is replaced when it has no request open
    blocked_s: float = 10.0  # an event loop that answers nothing for so long
    wall_s: float = 300.0  # limit of one request, with its stream
    start_s: float = 20.0  # from the fork until the module is imported
    memory_mib: int = 256  # private writable memory of one isolate, Python's own included
    disk_mib: int = 64  # of its scratch directory
    open_files: int = 256
    threads: int = 64  # of one function, threads and processes together
    request_mib: float = 100.0
    response_mib: float = 1024.0
    response_mib_per_s: float = 64.0  # of all streams of one function: they pass through the loop that serves all
    subrequests: int = 1000  # of one request: calls of bindings and fetches
    concurrency: int = 64  # requests open in one isolate, beyond which another copy is started
    max_isolates: int = 4  # of one function
    max_waiting: int = 256  # limit of requests that wait for an isolate
    idle_s: float = 60.0  # without a request, after which an isolate is ended
    log_kib_per_s: int = 256  # faster output waits
    sockets: int = 512  # WebSockets open in one isolate, beyond which another copy is started
    socket_idle_s: float = 3600.0  # without a message in either direction
    socket_message_mib: float = 1.0  # of one message, in either direction

    @property
    def socket_message_bytes(self) -> int:
        return int(self.socket_message_mib * 2**20)


class IsolateUsage(NamedTuple):
    """The present usage of an isolate."""

    idle_cpu_s: float = 0.0  # since it had a request
    request_cpu_s: float = 0.0  # CPU time of the request that has used most
    sockets_cpu_s: float = 0.0  # of open WebSockets, beyond their share
    memory_mib: int = 0
    silent_s: float = 0.0  # for so long its event loop has not answered
    background_s: float = 0.0  # CPU time of work after responses, while no request is open


class LimitRule(NamedTuple):
    code: str
    is_exceeded: Callable[[IsolateUsage, FunctionLimits], bool]
    sentence: Callable[[IsolateUsage, FunctionLimits], str]


LIMITS = (
    LimitRule(
        "cpu_time",
        lambda usage, limits: usage.idle_cpu_s > limits.cpu_ms / 1e3,
        lambda usage, limits: f"it used more than {limits.cpu_ms} ms of CPU time while it had no request",
    ),
    LimitRule(
        "cpu_time",
        lambda usage, limits: usage.request_cpu_s > limits.cpu_ms / 1e3,
        lambda usage, limits: f"it used more than {limits.cpu_ms} ms of CPU time for one request",
    ),
    LimitRule(
        "cpu_time",
        lambda usage, limits: usage.sockets_cpu_s > limits.cpu_ms / 1e3,
        lambda usage, limits: f"its WebSockets used {limits.cpu_ms} ms of CPU time beyond half of a core",
    ),
    LimitRule(
        "memory",
        lambda usage, limits: usage.memory_mib > limits.memory_mib,
        lambda usage, limits: f"it used {usage.memory_mib} MiB of memory, of at most {limits.memory_mib}",
    ),
    LimitRule(
        "blocked",
        lambda usage, limits: usage.silent_s > limits.blocked_s,
        lambda usage, limits: f"it blocked its event loop for more than {limits.blocked_s:g} s",
    ),
    LimitRule(
        "wall_time",
        lambda usage, limits: usage.background_s > limits.wall_s,
        lambda usage, limits: f"its background work (waitUntil) has not ended within {limits.wall_s:g} s",
    ),
)


def first_exceeded(usage: IsolateUsage, limits: FunctionLimits) -> tuple[str, str] | None:
    """Return why an isolate must be ended, and the code; None if it is within its limits."""
    for limit in LIMITS:
        if limit.is_exceeded(usage, limits):
            return limit.sentence(usage, limits), limit.code
    return None
