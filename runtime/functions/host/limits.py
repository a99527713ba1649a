"""What a function may use, and what happens when it uses more. Frozen values with units; the site file sets them (sites/site.py, [functions])."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FunctionLimits:
    cpu_ms: int = 30_000  # of one request; the isolate's time is divided among the requests it has open
    cpu_total_s: float = 3600.0  # of one isolate, which is replaced when it has no request open
    blocked_s: float = 10.0  # an event loop that answers nothing for so long
    wall_s: float = 300.0  # of one request, its stream included
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
    max_waiting: int = 256  # requests that wait for one of them
    idle_s: float = 60.0  # without a request, after which an isolate is ended
    log_kib_per_s: int = 256  # what is printed faster waits
    sockets: int = 512  # WebSockets open in one isolate, beyond which another copy is started
    socket_idle_s: float = 3600.0  # without a message in either direction
    socket_message_mib: float = 1.0  # of one message, in either direction

    @property
    def socket_message_bytes(self) -> int:
        return int(self.socket_message_mib * 2**20)
