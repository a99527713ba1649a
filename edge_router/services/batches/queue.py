"""The queue of batches: sends waiting requests while the network has idle capacity, accounts in turn.

A request takes the normal path. So it continues elsewhere when a site dies, has its account's models, quotas and data rules, and is billed. Its usage
record has the request's own name as its id: if the router is killed before it stores the answer, the request is sent again and billed once. A site
has idle capacity if nothing waits there and few requests are in progress, so interactive requests come first.
"""

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple
from urllib.parse import quote

import orjson

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.requests.request import Head
from pilotlight.edge_router.services.batches.batch_store import (
    LIMITS,
    BatchLimits,
    BatchStore,
    StoredBatch,
    WaitingRequest,
)
from pilotlight.wire.credentials import Access, Key
from pilotlight.wire.errors import ApiError

IDLE_BELOW = 8  # requests in progress at a site, from all owners
LOOK_EVERY_S = 0.5  # interval between looks at sites' status, which is a second old
SWEEP_EVERY_S = 60.0
TRIES_OF_ERRORS = 3  # attempts of a request if sites fail
LONGEST_WAIT_S = 60.0
TRY_LATER = (429, 502, 503)  # statuses that are not the request's fault: it is tried again until the batch's time ends
FAILED = (408, 500, 504)

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
        limits: BatchLimits = LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns seconds since the epoch. Raises sqlite3.Error, OSError."""
        self.store = BatchStore(path, limits)
        self._limits = limits
        self._proxy = proxy
        self._access = access
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "batches")
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._num_turns = 0
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
        for model in models:
            self._lanes.setdefault((owner, model), _Lane(owner, model)).is_empty = False
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
        while not self._proxy.admission.is_draining and (lane := self._next_lane()) is not None:
            try:
                request = await self.do(self.store.next_waiting, lane.owner, lane.model, lane.last)
            except ApiError:
                raise
            except Exception:  # an unreadable row delays only its owner, by a minute
                log.exception("the next request of %s for %s cannot be read", lane.owner, lane.model)
                request = None
            if request is None:
                if not lane.num_open:
                    del self._lanes[lane.owner, lane.model]
                lane.is_empty = True
                continue
            self._num_turns += 1
            lane.last, lane.turn, lane.num_open = request.number, self._num_turns, lane.num_open + 1
            self._under_way[request.number] = asyncio.create_task(self._answer(lane, request), name="batch request")

    def _next_lane(self) -> "_Lane | None":
        """Return the lane whose owner was served the longest ago, among models with capacity."""
        turns, num_open = Counter[str](), Counter[str]()
        for lane in self._lanes.values():
            turns[lane.owner] = max(turns[lane.owner], lane.turn)
            num_open[lane.model] += lane.num_open
        has_room = {model: self._has_room(model, number) for model, number in num_open.items()}
        lanes = [lane for lane in self._lanes.values() if not lane.is_empty and has_room[lane.model]]
        return min(lanes, key=lambda lane: (turns[lane.owner], lane.turn), default=None)

    def _has_room(self, model: str, num_open: int) -> bool:
        """Tell whether a request for the model may start, when `num_open` are in progress."""
        sites = [each for each in self._proxy.selector.backends.values() if each.state == "healthy"]
        serving = [each for each in sites if each.view().model(model) is not None] or sites
        return num_open < IDLE_BELOW * len(serving) and any(_is_idle(each) for each in serving)

    async def _answer(self, lane: "_Lane", request: WaitingRequest) -> None:
        try:
            status, answer = await self._asked(request)
            await self._keep(request, status, answer)
        except TimeoutError:  # the next sweep lets the request expire
            log.info("a request of %s was not answered in time", request.batch.id)
        finally:
            lane.num_open -= 1
            del self._under_way[request.number]
            if lane.is_empty and not lane.num_open:
                self._lanes.pop((lane.owner, lane.model), None)
            self._wake.set()

    async def _keep(self, request: WaitingRequest, status: int, answer: bytes) -> None:
        while True:
            try:
                return await self.do(self.store.answered, request, status, answer, self.now_s)
            except ApiError as error:
                log.error("an answer waits to be stored: %s", error)
                await asyncio.sleep(error.retry_after_s or 1.0)

    async def _asked(self, request: WaitingRequest) -> tuple[int, bytes]:
        """Return the network's answer; repeat a failed request until the batch's time ends.
        Raises TimeoutError."""
        num_errors, wait_s = 0, self._limits.first_wait_s
        async with asyncio.timeout(max(0.0, request.batch.expires_s - self._clock())):
            while True:
                answer = BatchAnswer(self._head(request.batch), f"{request.batch.id}.{request.number}")
                try:
                    answer.head.hold(self._holder(request.batch))
                except ApiError as error:
                    await answer.refuse(error)
                else:
                    await self._proxy.handle(answer, self._proxy.forward(answer, request.body))
                status = answer.status
                num_errors += status in FAILED
                if status not in TRY_LATER and (status not in FAILED or num_errors == TRIES_OF_ERRORS):
                    return status, answer.body
                await asyncio.sleep(max(wait_s, answer.retry_after_s))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _head(self, batch: StoredBatch) -> Head:
        headers = [("content-type", "application/json")]
        if not batch.key and not batch.owner.startswith("anonymous"):
            # The token of an unknown key is not stored; this substitute gives its owner a separate prefix cache.
            headers.append(("authorization", f"Bearer batches-of-{batch.owner}"))
        head = Head("POST", batch.path, quote(batch.path, safe="/:@!$&'()*+,;=~"), headers)
        head.is_for_batch = True
        return head

    def _holder(self, batch: StoredBatch) -> Key | None:
        """Return the key that created the batch, with its current rights; None if it was an unknown one.
        Raises ApiError if the key was deleted or has no right to models, or if unknown keys are no longer accepted."""
        if not batch.key:
            return self._access.key(None, "models") if self._access.is_required else None
        key = next((key for key in self._access.keys.values() if key.name == batch.key), None)
        if key is None:
            raise ApiError("unauthorized", f"the key {batch.key}, which created the batch, no longer exists")
        key.check("models", self._clock())
        return key


class _Lane:
    """One owner's waiting requests for one model."""

    def __init__(self, owner: str, model: str) -> None:
        self.owner = owner
        self.model = model
        self.last = 0  # the number of the last request that was started
        self.turn = 0  # number of the turn in which it was started
        self.num_open = 0
        self.is_empty = False


class BatchAnswer:
    """A request of a batch. To the proxy it is a client that never leaves; it stores its answer."""

    address = ""
    is_streaming = False  # a streamed request is refused when its batch is made

    def __init__(self, head: Head, request_id: str) -> None:
        self.head = head
        self.request_id = request_id
        self.status = 500  # 500 until there is an answer
        self.body = b""
        self.retry_after_s = 0.0
        self._task = asyncio.current_task()

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.body = status, body

    async def refuse(self, error: ApiError) -> None:
        self.retry_after_s = error.retry_after_s or 0.0
        await self.respond(error.status(self.head.dialect), [], orjson.dumps(error.body(self.head.dialect)))

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        raise ApiError("internal_error", "a site answered a request of a batch with a stream")

    async def write(self, batch: bytes) -> None:
        raise AssertionError("no stream begins")

    def write_now(self, batch: bytes) -> bool:
        raise AssertionError("no stream begins")

    async def end_stream(self) -> None:
        raise AssertionError("no stream begins")

    def cut(self, error: ApiError) -> None:
        """Stop the request because the router drains; the next router sends it again."""
        if self._task is not None:
            self._task.cancel()

    def look(self, now: float, awake_since: float) -> None:
        """Do nothing: a batch's request never waits for a reader."""


def _is_idle(backend: Backend) -> bool:
    status = backend.status
    if status is None or any(model.waiting or model.queued_tokens for model in status.models):
        return False
    return max(status.inflight, backend.outstanding) < IDLE_BELOW
