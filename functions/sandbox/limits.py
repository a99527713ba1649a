"""The limits of a function, and the check of a running isolate against them.

The check returns the exceeded limit with a sentence for the author. The site file sets the limits (sites/site.py, [functions]). isolate_watch.py
measures the usage; isolate_handle.py ends the isolate.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class FunctionLimits:
    cpu_ms: int = 30_000  # per request; an isolate's CPU time is divided among its open requests
    cpu_total_s: float = 3600.0  # per isolate, which is then replaced as soon as no request is open
    blocked_s: float = 10.0  # longest time in which the event loop does not reply
    wall_s: float = 300.0  # per request, including its stream
    start_s: float = 20.0  # from the fork to the end of the module's import
    memory_mib: int = 256  # private writable memory of one isolate, including Python's own
    disk_mib: int = 64  # files in the scratch directory
    open_files: int = 256
    threads: int = 64  # threads and processes of one function
    request_mib: float = 100.0
    response_mib: float = 1024.0
    # limit of all streams of one function together, because one event loop relays all streams of the site
    response_mib_per_s: float = 64.0
    subrequests: int = 1000  # binding calls and fetches of one request
    concurrency: int = 64  # open requests per isolate; for more, another isolate is started
    max_isolates: int = 4  # per function
    max_waiting: int = 256  # requests that wait for an isolate
    idle_s: float = 60.0  # an isolate without a request is ended after this
    log_kib_per_s: int = 256  # faster output is slowed down
    sockets: int = 512  # open WebSockets per isolate; for more, another isolate is started
    socket_idle_s: float = 3600.0  # a WebSocket without a message in either direction is closed after this
    socket_message_mib: float = 1.0  # per message, in either direction
    socket_stall_s: float = 60.0  # time in which a client must take a message
    socket_close_s: float = 5.0  # time for the other side to close, too, and for the function's close handlers
    sockets_share: float = 0.5  # share of a core that all open WebSockets of an isolate may use permanently
    idle_look_s: float = 0.2  # pause between two measurements of an idle isolate; there may be thousands of isolates

    @property
    def socket_message_bytes(self) -> int:
        return int(self.socket_message_mib * 2**20)


class IsolateUsage(NamedTuple):
    """The current usage of an isolate."""

    idle_cpu_s: float = 0.0  # CPU time since the last request
    request_cpu_s: float = 0.0  # CPU time of the request that has used most
    sockets_cpu_s: float = 0.0  # CPU time of WebSockets above their allowed share
    memory_mib: int = 0
    silent_s: float = 0.0  # time for which the event loop has owed a reply to a ping
    background_s: float = 0.0  # time of background work after responses, while no request is open


def first_exceeded(usage: IsolateUsage, limits: FunctionLimits) -> tuple[str, str] | None:
    """Return why an isolate must be ended, and the error code; None if it is within its limits."""
    cpu_s = limits.cpu_ms / 1e3
    if usage.idle_cpu_s > cpu_s:
        return f"it used more than {limits.cpu_ms} ms of CPU time while it had no request", "cpu_time"
    if usage.request_cpu_s > cpu_s:
        return f"it used more than {limits.cpu_ms} ms of CPU time for one request", "cpu_time"
    if usage.sockets_cpu_s > cpu_s:
        return f"its WebSockets used {limits.cpu_ms} ms of CPU time beyond half of a core", "cpu_time"
    if usage.memory_mib > limits.memory_mib:
        return f"it used {usage.memory_mib} MiB of memory, of at most {limits.memory_mib}", "memory"
    if usage.silent_s > limits.blocked_s:
        return f"it blocked its event loop for more than {limits.blocked_s:g} s", "blocked"
    if usage.background_s > limits.wall_s:
        return f"its background work (waitUntil) has not ended within {limits.wall_s:g} s", "wall_time"
    return None
