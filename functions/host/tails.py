"""Live output of functions for followers.

Each follower has a bounded queue; a follower that is too slow misses lines and gets a note about it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import NamedTuple

MAX_FOLLOWERS = 16  # per function
MAX_WAITING = 1000  # lines queued per follower


class Line(NamedTuple):
    at_s: float
    text: str


class Tails:
    def __init__(self) -> None:
        self._followers: defaultdict[str, list[asyncio.Queue[Line]]] = defaultdict(list)

    def is_followed(self, function: str) -> bool:
        return function in self._followers

    def publish(self, function: str, text: str) -> None:
        if not self.is_followed(function):
            return
        line = Line(time.time(), text)
        for queue in self._followers[function]:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(
                    Line(line.at_s, f"({MAX_WAITING} lines were dropped, because they were not read in time)")
                )
            queue.put_nowait(line)

    def is_full(self, function: str) -> bool:
        return function in self._followers and len(self._followers[function]) >= MAX_FOLLOWERS

    async def follow(self, function: str) -> AsyncGenerator[Line, None]:
        """Yield lines of output from now on, until the generator is closed."""
        queue: asyncio.Queue[Line] = asyncio.Queue(MAX_WAITING)
        self._followers[function].append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers[function].remove(queue)
            if not self._followers[function]:
                del self._followers[function]
