"""Requests that wait for a free isolate: limits their number and wakes them up."""

import asyncio

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.faults import Fault


class Waiters:
    def __init__(self, function: str, most: int) -> None:
        self.count = 0
        self.is_closed = False
        self._function = function
        self._most = most
        self._freed = asyncio.Event()

    async def wait(self, most_s: float | None = None) -> None:
        """Wait until `notify`, or for `most_s` seconds.
        Raises Failure if too many wait already, Fault if the version is being replaced."""
        if self.is_closed:
            raise Fault(f"the function {self._function!r} is being replaced", code="closing")
        if self.count >= self._most:
            raise Failure(f"all isolates of {self._function!r} are busy", code="overloaded", status=503)
        self.count += 1
        self._freed.clear()
        try:
            async with asyncio.timeout(most_s):
                await self._freed.wait()
        except TimeoutError:
            return
        finally:
            self.count -= 1

    def close(self) -> None:
        """Refuse requests that would wait from now on."""
        self.is_closed = True

    def notify(self) -> None:
        self._freed.set()
