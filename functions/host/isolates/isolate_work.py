"""The open work of one isolate, and the CPU time charged to each part.

The kernel measures only the whole process: CPU time between two measurements is divided among the requests that were open at both, with one more
share for all WebSockets.
"""

import time
from collections.abc import Callable
from typing import Protocol

from pilotlight.functions.host.faults import Fault

MAX_OBJECTS = 10_000  # limit of recorded objects with background work, because a function reports them


class OpenSocket(Protocol):
    """The output stream of a WebSocket that a function has accepted."""

    def end(self, why: Fault) -> None: ...


class IsolateWork:
    """Open requests, WebSockets and background work (waitUntil) of one isolate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.requests: dict[int, float] = {}  # CPU seconds charged so far, by request
        self.num_waiting = 0  # requests that wait until the isolate has started
        self.open_sockets: set[OpenSocket] = set()
        self.background = 0
        self.objects: dict[tuple[str, str], int] = {}  # pieces of background work, by Durable Object (class, id)
        self.has_objects = False  # whether it has instances of Durable Objects, which no other isolate has
        self.idle_since = self._background_since = clock()

    @property
    def load(self) -> int:
        """The number of requests that are open or wait for the start."""
        return len(self.requests) + self.num_waiting

    @property
    def sockets(self) -> int:
        return len(self.open_sockets)

    def begin(self, id: int) -> None:
        self.requests[id] = 0.0

    def end(self, id: int) -> float:
        """Close a request; return the CPU seconds charged to it."""
        self.idle_since = self._clock()
        return self.requests.pop(id, 0.0)

    def close_socket(self, stream: OpenSocket) -> None:
        self.open_sockets.discard(stream)
        self.idle_since = self._clock()

    def set_background(self, count: int) -> None:
        """Set the number of pieces of background work, as the isolate reports it."""
        if self.background == 0:
            self._background_since = self._clock()
        self.background = max(0, count)
        if self.background == 0:
            self.idle_since = self._clock()

    def set_object_background(self, object: tuple[str, str], count: int) -> None:
        """Set how many pieces of background work a Durable Object has, as the isolate reports it."""
        if count > 0 and (object in self.objects or len(self.objects) < MAX_OBJECTS):
            self.objects[object] = count
        elif count <= 0:
            self.objects.pop(object, None)

    def background_s(self) -> float:
        """Return for how many seconds background work has run while no request is open."""
        return self._clock() - self._background_since if self.background and not self.requests else 0.0


class CpuMeter:
    """Charges an isolate's CPU time to its open work."""

    def __init__(self, work: IsolateWork, sockets_share: float, now: float) -> None:
        """`sockets_share` is the share of a core that WebSockets may use."""
        self._work = work
        self._sockets_share = sockets_share
        self.total_s = 0.0
        self.idle_s = 0.0  # CPU time since the last request
        self.sockets_s = 0.0  # CPU time of WebSockets above their allowed share
        self._seen: set[int] = set()  # requests that were open at the last measurement
        self._charged_at = now

    def spent(self, total_s: float) -> float:
        """Return the CPU seconds since the last call; `total_s` is the process's CPU time."""
        spent_s, self.total_s = max(0.0, total_s - self.total_s), max(total_s, self.total_s)
        return spent_s

    def charge(self, spent_s: float, now: float) -> None:
        requests, sockets = self._work.requests, self._work.sockets
        charged = [id for id in requests if id in self._seen]  # newer requests have used little of this time
        sharers = len(charged) + (sockets > 0)
        for id in charged:
            requests[id] += spent_s / sharers
        allowed_s = self._sockets_share * (now - self._charged_at)
        self.sockets_s = max(0.0, self.sockets_s + spent_s / sharers - allowed_s) if sockets else 0.0
        self.idle_s = 0.0 if requests or sockets else self.idle_s + spent_s
        self._seen = set(requests)
        self._charged_at = now

    def charge_idle(self, spent_s: float) -> None:
        self.idle_s += spent_s
