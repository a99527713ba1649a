"""The memory budget for the processes of idle functions: their zygotes and spare isolates.

While there is room, a deployed function gets both before its first request. Above the budget, the processes of the functions that have been idle
longest are ended: spare isolates first, because a zygote saves more of a start and uses less memory.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from pilotlight.functions.host.isolates.isolate_factory import IsolateFactory
from pilotlight.functions.host.isolates.isolate_set import IsolateSet
from pilotlight.functions.sandbox.zygotes.zygote_client import COPIED_MIB

TRIM_S = 2.0
SPARE_MIB = 4  # measured: 3.5 of a small function, 4.2 with FastAPI
SPARES_AT_ONCE = 2  # spare isolates forked per check of all functions: each delays the event loop by 0.5 ms


class ZygoteTimings(NamedTuple):
    prepare_after_s: float = 0.5  # pause after the site's start, because models load first
    prepare_every_s: float = 0.05  # pause between two zygotes; each takes 6 ms of a core


class PoolProcesses(Protocol):
    """The part of a function's pool that the budget uses."""

    factory: IsolateFactory
    isolates: IsolateSet

    async def prepare(self) -> None: ...


class ZygoteBudget:
    def __init__(
        self, mib: int, timings: ZygoteTimings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mib = mib
        self._timings = timings or ZygoteTimings()
        self._clock = clock
        self._asleep_mib = 0  # memory of idle functions' zygotes and of spare isolates, as last measured
        self._trimmed_at = 0.0
        self._unprepared: asyncio.Queue[PoolProcesses] = asyncio.Queue()

    def add(self, pool: PoolProcesses) -> None:
        """Queue a function whose zygote should be created soon."""
        self._unprepared.put_nowait(pool)

    async def prepare(self, is_served: Callable[[PoolProcesses], bool]) -> None:
        """Create the zygotes of queued functions, one after the other, until cancelled."""
        await asyncio.sleep(self._timings.prepare_after_s)
        while True:
            pool = await self._unprepared.get()
            if is_served(pool) and self._asleep_mib < self._mib:
                await pool.prepare()
                self._asleep_mib += COPIED_MIB  # an estimate until the next measurement
            elif is_served(pool):
                await pool.factory.zygote.read_imports()
            await asyncio.sleep(self._timings.prepare_every_s)

    def trim(self, pools: Iterable[PoolProcesses]) -> None:
        """End zygotes above the budget; checks at most every two seconds."""
        if (now := self._clock()) - self._trimmed_at > TRIM_S:
            self._trimmed_at = now
            self.end_longest_asleep(pools)

    def fork_spares(self, pools: Iterable[PoolProcesses]) -> bool:
        """Fork a few missing spare isolates, while there is room; return whether any were forked."""
        now = self._clock()
        most = min(SPARES_AT_ONCE, max(0, self._mib - self._asleep_mib) // SPARE_MIB)
        wanting = [*islice((pool for pool in pools if pool.isolates.wants_spare(now)), most)]
        for pool in wanting:
            pool.isolates.fork_spare()
            self._asleep_mib += SPARE_MIB
        return bool(wanting)

    def end_longest_asleep(self, pools: Iterable[PoolProcesses]) -> None:
        """End the processes of functions that have been idle longest, until the rest fits the budget."""
        asleep: list[tuple[float, int, PoolProcesses]] = []
        num_spares = 0
        for pool in pools:
            num_spares += pool.isolates.has_spare
            if (since := (zygote := pool.factory.zygote).asleep_since) is not None:
                asleep.append((since, COPIED_MIB if zygote.asleep_mib is None else zygote.asleep_mib, pool))
        asleep.sort(key=lambda each: each[0])
        self._asleep_mib = sum(mib for _, mib, _ in asleep) + SPARE_MIB * num_spares
        over_mib = self._asleep_mib - self._mib
        for _, _, pool in asleep:
            if over_mib > 0 and pool.isolates.has_spare:
                pool.isolates.end_spare()
                over_mib -= SPARE_MIB
        for _, mib, pool in asleep:
            if over_mib > 0:
                pool.factory.zygote.close()
                over_mib -= mib
