"""Time limits for the answers of other processes.

A timer that fires late shows that this process was stopped, or starved of the processor. It read no answers until then, so the silence says nothing
about the other process.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_S = 0.25  # lateness of a timer after which the process counts as stopped; event loops under load are late by less


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes more than `seconds`.

    The limit begins again if this process was stopped when it ended.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def set_timer() -> None:
        nonlocal timer
        due = loop.time() + seconds
        timer = loop.call_at(due, end, due)

    def end(due: float) -> None:
        if loop.time() - due > LATE_S:
            set_timer()
        else:
            limit.reschedule(due)

    async with asyncio.timeout(None) as limit:
        set_timer()
        try:
            yield
        finally:
            timer.cancel()
