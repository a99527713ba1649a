"""The limits of a running isolate, as a table: which measure, how much of it, and the sentence that its author reads.

The first row that is exceeded names the reason. Knows numbers only; who measures and who ends is isolate_handle.py's.
"""

from collections.abc import Callable
from typing import NamedTuple

from runtime.functions.host.limits import FunctionLimits

SOCKETS_SHARE = 0.5  # of a core, which an isolate's open WebSockets may use for as long as they are open


class IsolateUsage(NamedTuple):
    """What an isolate uses now."""

    idle_cpu_s: float = 0.0  # since it had a request
    request_cpu_s: float = 0.0  # of the request that has used most
    sockets_cpu_s: float = 0.0  # of open WebSockets, beyond their share
    memory_mib: int = 0
    silent_s: float = 0.0  # for which its event loop owes an answer
    background_s: float = 0.0  # of work behind responses, while no request is open


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
    """The reason for which an isolate is to be ended, and its code."""
    for limit in LIMITS:
        if limit.is_exceeded(usage, limits):
            return limit.sentence(usage, limits), limit.code
    return None
