"""The queue of batches: sends waiting requests while the network has idle capacity, accounts in turn.

lanes.py decides whose turn it is, sender.py sends a request.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.services.batches.batch_store import BatchLimits, BatchStore, WaitingRequest
from pilotlight.edge_router.services.batches.lanes import Lane, Lanes
from pilotlight.edge_router.services.batches.sender import BatchSender
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import ApiError

LOOK_EVERY_S = 0.5  # interval between looks at sites' status, which is a second old
SWEEP_EVERY_S = 60.0

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

log = logging.getLogger("pilotlight.batches")


class BatchQueue:
    """Answers waiting requests of batches. Run `run()` as a task, and `close()` after it."""

    def __init__(
        self,
        path: Path,
        proxy: Proxy,
        access: Access,
        limits: BatchLimits,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` returns seconds since the epoch. Raises sqlite3.Error, OSError."""
        self.store = BatchStore(sqlite3.connect(path, timeout=5.0, check_same_thread=False), limits)
        self._admission = proxy.admission
        self._sender = BatchSender(proxy, access, limits.first_wait_s, clock, sleep)
        self._clock, self._sleep = clock, sleep
        self._thread = ThreadPoolExecutor(1, "batches")
        self._lanes = Lanes(proxy.selector.backends)
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    @property
    def now_s(self) -> int:
        return int(self._clock())

    @property
    def under_way(self) -> tuple[int, ...]:
        """Return the numbers of requests that are in progress."""
        return tuple(self._under_way)

    async def do(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run a function of the store in its thread. Raises ApiError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args))
        except (sqlite3.Error, OSError) as error:
            raise ApiError("overloaded", f"batches cannot be stored right now: {error}", retry_after_s=5) from None

    def added(self, owner: str, models: set[str]) -> None:
        """Note that an owner has new waiting requests for these models."""
        self._lanes.add(owner, models)
        self._wake.set()

    async def run(self) -> None:
        swept_at = float("-inf")
        while True:
            try:
                if time.monotonic() - swept_at >= SWEEP_EVERY_S:
                    swept_at = time.monotonic()
                    await self.do(self.store.sweep, self.under_way, self.now_s)
                    # Requests of a previous router, and requests that were stored although their client left before `added`.
                    for owner, model in await self.do(self.store.waiting):
                        self.added(owner, {model})
                self._wake.clear()
                await self._begin_requests()
            except ApiError as error:
                log.error("%s", error)
            try:
                async with asyncio.timeout(LOOK_EVERY_S if self._lanes else SWEEP_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Stop. Requests in progress are left to the next router."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown()
        self.store.close()

    async def _begin_requests(self) -> None:
        while not self._admission.is_draining and (lane := self._lanes.next()) is not None:
            try:
                request = await self.do(self.store.next_waiting, lane.owner, lane.model, lane.last)
            except ApiError:
                raise
            except Exception:  # an unreadable row delays only its owner, by a minute
                log.exception("the next request of %s for %s cannot be read", lane.owner, lane.model)
                request = None
            if request is None:
                self._lanes.exhaust(lane)
                continue
            self._lanes.begin(lane, request.number)
            self._under_way[request.number] = asyncio.create_task(self._answer(lane, request), name="batch request")

    async def _answer(self, lane: Lane, request: WaitingRequest) -> None:
        try:
            status, answer = await self._sender.ask(request)
            await self._keep(request, status, answer)
        except TimeoutError:  # the next sweep lets the request expire
            log.info("a request of %s was not answered in time", request.batch.id)
        finally:
            self._lanes.end(lane)
            del self._under_way[request.number]
            self._wake.set()

    async def _keep(self, request: WaitingRequest, status: int, answer: bytes) -> None:
        while True:
            try:
                return await self.do(self.store.answered, request, status, answer, self.now_s)
            except ApiError as error:
                log.error("an answer waits to be stored: %s", error)
                await self._sleep(error.retry_after_s or 1.0)
