"""Time limits for the silence of other processes.

A timer that fires late shows that this process was stopped, or starved of the processor: by a signal, with its machine, or in a virtual machine that
is moved. It read no answers meanwhile, so the silence says nothing about the other process: limits of silence begin again, and limits of a whole wait
are longer by the pause.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any

LATE_S = 0.25  # lateness of a timer after which the process counts as stopped; event loops under load are late by less
TICK_S = 1.0  # a pause is noticed by the next of such ticks; at most one tick of it counts as silence, and one is left to read answers after it


class Pauses:
    """The pauses of this process, noticed by a check that is made at least once in an interval."""

    def __init__(self, interval_s: float, late_s: float = LATE_S) -> None:
        self.ended_at = float("-inf")  # the end of the latest pause
        self._most_s = interval_s + late_s
        self._checked_at = float("inf")  # no check yet

    def check(self, now: float) -> None:
        if now - self._checked_at > self._most_s:
            self.ended_at = now
        self._checked_at = now

    def silent_s(self, since: float, now: float) -> float:
        """Return how long a silence has lasted for which this process may blame the other."""
        self.check(now)
        return now - max(since, self.ended_at)


NO_PAUSES = Pauses(float("inf"))


class TimeLimit:
    """A time limit for a wait, or for several one after the other, from its creation on.

    Entered again for each wait; raises TimeoutError in the block when the time is over.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + seconds
        self._timeout: asyncio.Timeout
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._set_timer(self._loop.time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _set_timer(self, now: float) -> None:
        due = min(max(self._ends_at, now), now + TICK_S)
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        if now - due > LATE_S:
            self._ends_at = max(self._ends_at + now - due, now + min(self._seconds, TICK_S))
        elif now >= self._ends_at:
            return self._timeout.reschedule(now)
        self._set_timer(now)


async def done_within(seconds: float, work: "asyncio.Future[Any]") -> bool:
    """Wait for work, at most for `seconds`; return whether it is done."""
    with suppress(TimeoutError):
        async with TimeLimit(seconds):
            await asyncio.wait({work})
    return work.done()
