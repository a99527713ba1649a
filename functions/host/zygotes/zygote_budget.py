"""Memory for the zygotes of idle functions, with their imports.

A deployed function has its zygote before its first request if there is room. Zygotes of the functions that have been idle longest end first.
"""

import asyncio
from collections.abc import Callable, Iterable

from pilotlight.functions.host.pool import FunctionPool
from pilotlight.functions.host.zygotes.zygote_client import COPIED_MIB

PREPARE_AFTER_S = 0.5  # after a site's start: models come first
PREPARE_EVERY_S = 0.05  # a zygote for each function, one after the other: each takes 6 ms of a core
TRIM_S = 2.0


class ZygoteBudget:
    def __init__(self, mib: int) -> None:
        self._mib = mib
        self._asleep_mib = 0  # at the last look
        self._trimmed_at = 0.0
        self._unprepared: asyncio.Queue[FunctionPool] = asyncio.Queue()

    def add(self, pool: FunctionPool) -> None:
        """Start a function's zygote soon."""
        self._unprepared.put_nowait(pool)

    async def prepare(self, is_served: Callable[[FunctionPool], bool]) -> None:
        """Make zygotes of added functions, one after the other. Never returns."""
        await asyncio.sleep(PREPARE_AFTER_S)
        while True:
            pool = await self._unprepared.get()
            if is_served(pool) and self._asleep_mib < self._mib:
                await pool.prepare()
                self._asleep_mib += COPIED_MIB  # until the next look
            await asyncio.sleep(PREPARE_EVERY_S)

    def trim(self, pools: Iterable[FunctionPool]) -> None:
        """End zygotes beyond the budget; called often, looks now and then."""
        if (now := asyncio.get_running_loop().time()) - self._trimmed_at > TRIM_S:
            self._trimmed_at = now
            self.end_longest_asleep(pools)

    def end_longest_asleep(self, pools: Iterable[FunctionPool]) -> None:
        """End zygotes until those left take no more than the budget."""
        zygotes = (pool.factory.zygote for pool in pools)
        asleep = [
            (zygote.asleep_since, COPIED_MIB if zygote.asleep_mib is None else zygote.asleep_mib, zygote)
            for zygote in zygotes
            if zygote.asleep_since is not None
        ]
        self._asleep_mib = sum(mib for _, mib, _ in asleep)
        over_mib = self._asleep_mib - self._mib
        for _, mib, zygote in sorted(asleep, key=lambda each: each[0]):
            if over_mib <= 0:
                return
            zygote.close()
            over_mib -= mib
