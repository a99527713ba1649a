"""Pace: a rate that several share, with a short burst. Who would go beyond it waits; nobody is refused."""

import asyncio

BURST_S = 0.004  # of the rate, at once: what is sent in one go holds up everybody else


class StreamThrottle:
    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._paid_until = 0.0

    async def take(self, amount: float) -> None:
        now = asyncio.get_running_loop().time()
        self._paid_until = max(now, self._paid_until) + amount / self._per_s
        if self._paid_until - now > BURST_S:
            await asyncio.sleep(self._paid_until - now - BURST_S / 2)
