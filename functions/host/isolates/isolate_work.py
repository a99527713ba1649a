"""The open work of one isolate, and the CPU time charged to each part.

The kernel counts a process as a whole: time between two measurements is divided among the requests that were open at both, and the WebSockets.
"""

import asyncio
from typing import TYPE_CHECKING

from pilotlight.functions.host.limits import SOCKETS_SHARE

if TYPE_CHECKING:
    from pilotlight.functions.host.response_stream import ResponseStream

MAX_OBJECTS = 10_000  # objects whose background work is recorded: the function reports it, and it costs memory here


class IsolateWork:
    """Open requests, WebSockets and background work (waitUntil) of one isolate."""

    def __init__(self, now: float) -> None:
        self.requests: dict[int, float] = {}  # CPU seconds charged so far, by request
        self.num_waiting = 0  # requests that wait for the isolate's start
        self.open_sockets: set[ResponseStream] = set()  # output of the function's WebSockets
        self.background = 0
        self.objects: dict[tuple[str, str], int] = {}  # Durable Objects by class and id, and how many requests each has
        self.has_objects = False  # instances of Durable Objects, which no other isolate has
        self.idle_since = now
        self._background_since = now

    @property
    def load(self) -> int:
        """Requests that are open or wait."""
        return len(self.requests) + self.num_waiting

    @property
    def sockets(self) -> int:
        return len(self.open_sockets)

    def begin(self, id: int) -> None:
        self.requests[id] = 0.0

    def end(self, id: int) -> float:
        """Return the CPU seconds that the request was charged."""
        self.idle_since = _now()
        return self.requests.pop(id, 0.0)

    def close_socket(self, stream: "ResponseStream") -> None:
        self.open_sockets.discard(stream)
        self.idle_since = _now()

    def set_background(self, count: int) -> None:
        """Record the number of pieces of background work that the isolate reports."""
        if self.background == 0:
            self._background_since = _now()
        self.background = max(0, count)
        if self.background == 0:
            self.idle_since = _now()

    def set_object_background(self, object: tuple[str, str], count: int) -> None:
        """Record how much of its background work belongs to a Durable Object, as the isolate reports."""
        if count > 0 and (object in self.objects or len(self.objects) < MAX_OBJECTS):
            self.objects[object] = count
        elif count <= 0:
            self.objects.pop(object, None)

    def background_s(self) -> float:
        """Return the seconds of background work without an open request."""
        return _now() - self._background_since if self.background and not self.requests else 0.0


class CpuMeter:
    """A meter that charges an isolate's CPU time to its open work."""

    def __init__(self, work: IsolateWork, now: float) -> None:
        self._work = work
        self.total_s = 0.0
        self.idle_s = 0.0  # used since there was a request
        self.sockets_s = 0.0  # beyond the share of open WebSockets
        self._seen: set[int] = set()  # requests that were open at the last look
        self._charged_at = now

    def spent(self, total_s: float) -> float:
        """CPU seconds since the last look."""
        spent_s, self.total_s = max(0.0, total_s - self.total_s), max(total_s, self.total_s)
        return spent_s

    def charge(self, spent_s: float, now: float) -> None:
        requests, sockets = self._work.requests, self._work.sockets
        charged = [id for id in requests if id in self._seen]  # newer requests have used little of this time
        sharers = len(charged) + (sockets > 0)
        for id in charged:
            requests[id] += spent_s / sharers
        allowed_s = SOCKETS_SHARE * (now - self._charged_at)
        self.sockets_s = max(0.0, self.sockets_s + spent_s / sharers - allowed_s) if sockets else 0.0
        self.idle_s = 0.0 if requests or sockets else self.idle_s + spent_s
        self._seen = set(requests)
        self._charged_at = now

    def charge_idle(self, spent_s: float) -> None:
        self.idle_s += spent_s


def _now() -> float:
    return asyncio.get_running_loop().time()
