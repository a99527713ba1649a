"""Probes whether an isolate's event loop replies: one ping at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pilotlight.functions.channel.failure import ChannelClosed

Ping = Callable[[], Awaitable[None]]
"""Waits until the event loop has replied. Raises ChannelClosed."""


class LoopProbe:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owed_since: float | None = None
        self._ping: asyncio.Task[None] | None = None

    def silent_s(self) -> float:
        """Return for how many seconds the event loop has owed a reply to the last ping; 0 if it has replied."""
        return 0.0 if self._owed_since is None else self._clock() - self._owed_since

    def begin(self, ping: Ping) -> None:
        """Send a ping, unless one is unanswered."""
        if self._ping is None:
            self._owed_since = self._clock()
            self._ping = asyncio.ensure_future(self._pinged(ping))

    async def _pinged(self, ping: Ping) -> None:
        try:
            await ping()
            self._owed_since = None
        except ChannelClosed:
            return
        finally:
            self._ping = None

    def close(self) -> None:
        if self._ping is not None:
            self._ping.cancel()
