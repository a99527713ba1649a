"""The choice of an isolate for a request, and the start of another one."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.host.invocations.invocation_log import FunctionJournal, InvocationLog
from pilotlight.functions.host.pool import FunctionPool, is_started
from pilotlight.functions.host.zygotes.pool_zygote import PoolContext
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser, UserIds
from pilotlight.functions.sandbox.limits import FunctionLimits

LIMITS = FunctionLimits(concurrency=4, max_isolates=3, sockets=2)


def isolate(load: int = 0, sockets: int = 0, *, lags: bool = False, is_started: bool = True) -> Any:
    started = asyncio.Event()
    if is_started:
        started.set()
    work = SimpleNamespace(load=load, sockets=sockets, num_waiting=0, has_objects=False)
    return SimpleNamespace(work=work, lags=lags, started=started, is_usable=True)


class Pool:
    """A pool of stand-ins for isolates; a newly started isolate is `new`."""

    def __init__(self, *usable: Any, is_closed: bool = False) -> None:
        self.new = isolate()
        self.num_waits = 0
        manifest, nothing = Manifest("hello", Path(), Path()), cast("Any", None)
        context = PoolContext(nothing, 1, FunctionUser(UserIds(is_root=False)), Path())
        journal = FunctionJournal(InvocationLog(nothing), manifest, "")
        self.pool = FunctionPool(manifest, LIMITS, context, cast("Any", self.wait), journal=journal)
        isolates = SimpleNamespace(usable=list(usable), start=self.start, is_at_work=False)
        self.pool.isolates = cast("Any", isolates)
        self.pool.waiters = cast("Any", SimpleNamespace(is_closed=is_closed, wait=self.wait))

    async def start(self) -> Any:
        return self.new

    async def wait(self) -> None:
        """Replace `Waiters.wait`: one request of each isolate ends at once."""
        self.num_waits += 1
        for each in cast("Any", self.pool.isolates).usable:
            each.work.load -= 1

    async def chosen(self, *, is_socket: bool = False) -> int | str:
        """Return the index of the chosen isolate, or "new"."""
        found = await self.pool.acquire(is_socket)
        return "new" if found is self.new else self.pool.isolates.usable.index(found)


@pytest.mark.parametrize(
    ("usable", "is_socket", "chosen"),
    [
        ([], False, "new"),
        ([], True, "new"),
        ([isolate(3)], False, 0),
        ([isolate(3), isolate(1)], False, 1),
        ([isolate(4)], False, "new"),  # the isolate has as many requests as allowed
        ([isolate(1, lags=True)], False, "new"),
        ([isolate(1, lags=True), isolate(3)], False, 1),
        ([isolate(4), isolate(4), isolate(3, lags=True)], False, 2),  # no more isolates may be started
        ([isolate(1, 1), isolate(3, 0)], True, 1),  # WebSockets stay open for long
        ([isolate(2, 1), isolate(1, 1)], True, 1),
        ([isolate(1, 2)], True, "new"),
        ([isolate(1, 1, lags=True)], True, "new"),
        ([isolate(1, 2), isolate(1, 2), isolate(1, 3)], True, 0),
        ([isolate(4, 4)], True, "new"),
    ],
)
async def test_a_request_gets_the_least_busy_and_a_new_one_where_all_are(
    usable: list[Any], is_socket: bool, chosen: int | str
) -> None:
    assert await Pool(*usable).chosen(is_socket=is_socket) == chosen


async def test_where_none_is_free_and_none_may_be_started_a_request_waits() -> None:
    for is_socket in (False, True):
        full = Pool(*(isolate(4) for _ in range(3)))
        assert (await full.chosen(is_socket=is_socket), full.num_waits) == (0, 1)
    closing = Pool(isolate(4), is_closed=True)
    assert (await closing.chosen(), closing.num_waits) == (0, 1)


async def test_an_isolate_that_is_being_started_counts_its_waiters_and_is_passed_over_if_it_fails() -> None:
    starting = isolate(is_started=False)
    waiting = asyncio.create_task(is_started(starting))
    await asyncio.sleep(0)
    assert starting.work.num_waiting == 1
    starting.is_usable = False
    starting.started.set()
    assert (await waiting, starting.work.num_waiting) == (False, 0)
    left = isolate(is_started=False)
    waiting = asyncio.create_task(is_started(left))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert left.work.num_waiting == 0


async def test_objects_live_in_the_oldest() -> None:
    pool = Pool(isolate(9), isolate(0))
    assert await pool.pool.acquire_oldest() is pool.pool.isolates.usable[0]
    assert await Pool().pool.acquire_oldest() is not None


async def test_no_more_sockets_are_opened_than_a_function_may_have() -> None:
    pool = Pool(*(isolate(1, 2) for _ in range(3)))
    made = pool.pool
    with pytest.raises(Failure, match="'hello' has reached its limit of open WebSockets") as refused:
        await made.ask(FetchEvent(UNNUMBERED, "GET", "http://host/"), is_socket=True)
    assert refused.value.status == 503
    assert not made.is_at_work
