"""The isolates of one version, with stand-ins whose state the test sets: which take requests, and which retire."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.isolates.isolate_handle import IsolateHandle
from pilotlight.functions.host.isolates.isolate_set import IsolateSet
from pilotlight.functions.host.isolates.isolate_work import IsolateWork
from pilotlight.functions.host.isolates.restarts import FREE, MAX_WAIT_S
from pilotlight.functions.host.waiters import Waiters
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError

LIMITS = FunctionLimits(idle_s=30.0)


class Isolate:
    def __init__(self, cpu_s: float = 0.0) -> None:
        self.work = IsolateWork()
        self.process = SimpleNamespace(is_deprioritized=False, is_running=True)
        self.watcher: Any = SimpleNamespace(total_s=0.0, last_look=lambda: setattr(self.watcher, "total_s", cpu_s))
        self.started = asyncio.Event()
        self.started.set()
        self.is_ready = self.is_usable = True
        self.is_retiring = self.is_tainted = self.lags = self.has_answered = self.is_closed = False
        self.looks: list[str] = []
        self.ended = ""
        self.num_loads = 0
        self.gone = asyncio.Event()

    def load(self) -> None:
        self.num_loads += 1

    def watch(self) -> None:
        self.looks.append("at work")

    def watch_idle(self) -> None:
        self.looks.append("idle")

    def end(self, why: str, code: str) -> None:
        self.ended = code

    async def close(self) -> None:
        self.is_closed = True
        self.gone.set()

    async def until_gone(self) -> None:
        await self.gone.wait()


class Zygote:
    why_to_end = ""
    is_alive = can_fork = True

    def __init__(self) -> None:
        self.current = self
        self.asked: list[bool] = []
        self.failed: list[str] = []

    def watch(self, *, is_asleep: bool) -> str:
        self.asked.append(is_asleep)
        return self.why_to_end

    def fail(self, why: str) -> None:
        self.failed.append(why)


class Factory:
    def __init__(self) -> None:
        self.limits = LIMITS
        self.zygote = Zygote()
        self.made: list[Isolate] = []
        self.probations: list[bool] = []
        self.fails_with: BaseException | None = None
        self.num_looked_at_disk = 0
        self.writing: list[Isolate] = []

    def new(self, on_fault: Any, *, is_on_probation: bool) -> Isolate:
        self.probations.append(is_on_probation)
        self.made.append(Isolate(cpu_s=1.5))
        return self.made[-1]

    async def start(self, isolate: Isolate, *, is_on_probation: bool) -> None:
        if self.fails_with is not None:
            raise self.fails_with

    def enforce_disk(self, isolates: list[Isolate]) -> None:
        self.num_looked_at_disk += 1
        self.writing = isolates


class Kept:
    """An IsolateSet with stand-ins for its parts."""

    def __init__(self) -> None:
        self.factory, self.waiters, self.told = Factory(), Waiters("f", 8), list[Fault]()
        reports = SimpleNamespace(tell=self.told.append)
        self.isolates = IsolateSet("f", cast(Any, self.factory), cast(Any, reports), self.waiters)

    async def started(self) -> Isolate:
        isolate = await self.isolates.start()
        assert isolate is not None
        return cast(Any, isolate)

    def fails(self, isolate: Isolate, fault: Fault) -> None:
        self.isolates.failed(cast(IsolateHandle, isolate), fault)

    @property
    def living(self) -> list[Any]:
        return [*self.isolates.living]


@pytest.fixture
def kept() -> Kept:
    return Kept()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_isolate_is_not_ended_for_its_files_before_it_has_started() -> None:
    kept = Kept()
    isolate = await kept.started()
    isolate.is_usable = False
    kept.isolates.watch()
    assert kept.factory.writing == []
    isolate.is_usable = True
    kept.isolates.watch()
    assert kept.factory.writing == [isolate]


async def test_those_that_start_may_be_asked_and_those_that_end_or_retire_may_not(kept: Kept) -> None:
    usable, starting, retiring, ending = [await kept.started() for _ in range(4)]
    starting.is_usable = False
    starting.started.clear()
    retiring.is_retiring = True
    ending.is_usable = False
    assert cast(Any, kept.isolates.usable) == [usable, starting]
    usable.work.begin(1)
    ending.work.num_waiting, starting.work.open_sockets = 2, {1, 2, 3}
    assert (kept.isolates.load, kept.isolates.sockets, kept.isolates.is_at_work) == (3, 3, True)
    usable.work.end(1)
    ending.work.num_waiting = 0
    assert not kept.isolates.is_at_work
    retiring.work.set_background(1)
    assert kept.isolates.is_at_work
    assert kept.isolates.num_started == 4


async def test_one_at_work_is_watched_and_one_that_sleeps_for_too_long_is_retired(kept: Kept) -> None:
    now = asyncio.get_running_loop().time()
    names = ("working", "background", "importing", "talking", "asleep", "long asleep", "retiring", "retiring at work")
    made = {name: await kept.started() for name in names}
    made["working"].work.begin(1)
    made["background"].work.set_background(1)
    made["importing"].is_ready = False
    made["talking"].work.open_sockets = {1}
    made["talking"].work.idle_since = made["long asleep"].work.idle_since = now - LIMITS.idle_s - 1.0
    made["asleep"].work.idle_since = now - LIMITS.idle_s + 10.0
    made["retiring"].is_retiring = made["retiring at work"].is_retiring = True
    made["retiring at work"].work.begin(1)
    assert kept.isolates.watch()
    await settle()
    assert {name: (isolate.looks, isolate.is_closed) for name, isolate in made.items()} == {
        "working": (["at work"], False), "background": (["at work"], False), "importing": (["at work"], False),
        "talking": (["at work"], False), "asleep": (["idle"], False), "long asleep": ([], True),
        "retiring": ([], True), "retiring at work": (["at work"], False),
    }  # fmt: skip
    assert len(kept.living) == 6
    assert (kept.factory.zygote.asked, kept.factory.num_looked_at_disk) == ([False], 1)
    await kept.isolates.close()
    assert not kept.isolates.watch()
    assert kept.factory.zygote.asked == [False, True]


@pytest.mark.parametrize(
    "error", [ZygoteError("no room"), OSError("no room"), Fault("theirs"), asyncio.CancelledError()]
)
async def test_an_isolate_that_cannot_be_started_is_left_nowhere_and_waiters_get_the_reason(
    kept: Kept, error: BaseException
) -> None:
    kept.factory.fails_with = error
    waiting = asyncio.ensure_future(kept.waiters.wait())
    await asyncio.sleep(0)
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - its class is checked below
        await kept.isolates.start()
    if isinstance(error, ZygoteError | OSError):
        assert isinstance(raised.value, Fault)
        assert (raised.value.code, "cannot be started: no room" in raised.value.message) == ("no_isolate", True)
    else:
        assert raised.value is error
    await asyncio.wait_for(waiting, 60)
    assert (kept.living, kept.isolates.num_started) == ([], 0)
    await kept.isolates.close()
    assert kept.factory.made[0].is_closed


async def test_an_isolate_that_ended_by_itself_is_counted_once_and_its_time_is_reported(kept: Kept) -> None:
    isolate = await kept.started()
    isolate.watcher.total_s = 0.5
    assert [kept.isolates.spent_cpu_s(), kept.isolates.spent_cpu_s()] == [0.5, 0.0]
    waiting = asyncio.ensure_future(kept.waiters.wait())
    await asyncio.sleep(0)
    isolate.gone.set()
    await asyncio.wait_for(waiting, 60)
    assert (kept.living, isolate.is_closed) == ([], True)
    assert [kept.isolates.spent_cpu_s(), kept.isolates.spent_cpu_s()] == [1.0, 0.0], "the last measurement counts, too"
    await kept.started()
    assert kept.factory.probations == [False, True], "on probation after a bad end"


async def test_one_that_cannot_be_watched_is_ended_and_the_others_are_watched(kept: Kept) -> None:
    isolates = [await kept.started() for _ in range(3)]

    def fail() -> None:
        raise RuntimeError("no /proc")

    isolates[1].watch_idle = fail
    isolates[2].work.begin(1)
    assert kept.isolates.watch() is True
    assert [isolate.looks for isolate in isolates] == [["idle"], [], ["at work"]]
    assert [isolate.ended for isolate in isolates] == ["", "unwatched", ""]


@pytest.mark.parametrize("why", ["is_deprioritized", "lags"])
async def test_beside_one_that_computes_for_long_the_next_is_on_probation(kept: Kept, why: str) -> None:
    isolate = await kept.started()
    setattr(isolate.process if why == "is_deprioritized" else isolate, why, True)
    await kept.started()
    await kept.isolates.close()
    await kept.started()
    assert kept.factory.probations == [False, True, False]


async def test_a_function_that_cannot_be_imported_is_not_tried_again_and_again(kept: Kept) -> None:
    for number in range(FREE + 1):
        isolate = await kept.started()
        kept.fails(isolate, Fault(f"import {number}", code="import_failed", name="E", detail="where"))
        kept.fails(isolate, Fault("again", code="import_failed"))
        assert (isolate.is_tainted, isolate.is_retiring, kept.living) == (True, True, [isolate])
        kept.isolates.watch()
        await settle()
        assert kept.living == []
    with pytest.raises(Fault) as raised:
        await kept.isolates.start()
    assert (raised.value.message, raised.value.code) == ("again", "import_failed")
    assert len(kept.told) == 2 * (FREE + 1)


async def test_processes_that_end_one_after_the_other_make_requests_wait_and_then_refuse_them(kept: Kept) -> None:
    now = asyncio.get_running_loop().time()
    for _ in range(FREE + 1):
        kept.isolates.restarts.ended_badly(now, had_answered=False)
    assert await kept.isolates.start() is None, "no isolate was due; it only waited"
    assert kept.factory.made == []
    while await kept.isolates.start() is None:
        assert kept.factory.made == []
    for _ in range(20):
        kept.isolates.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=False)
    with pytest.raises(Failure, match="keep ending without an answer") as refused:
        await kept.isolates.start()
    assert (refused.value.code, refused.value.status) == ("overloaded", 503)
    assert MAX_WAIT_S < refused.value.retry_after_s <= 5


@pytest.mark.parametrize(("sockets", "has_objects", "name", "is_replaced"), [
    (0, False, "MemoryError", True), (1, False, "MemoryError", False), (0, True, "MemoryError", False), (0, False, "ValueError", False),
])  # fmt: skip
async def test_one_without_memory_is_replaced_unless_that_would_lose_what_only_it_has(
    kept: Kept, sockets: int, has_objects: bool, name: str, is_replaced: bool
) -> None:
    isolate = await kept.started()
    isolate.work.open_sockets, isolate.work.has_objects = set(range(sockets)), has_objects
    kept.fails(isolate, Fault("it is full", name=name))
    assert (isolate.is_retiring, isolate.is_tainted) == (is_replaced, is_replaced)
    isolate.gone.set()
    await settle()
    assert kept.isolates.restarts.pause_s(0.0) == 0.0, "counted as one bad end"
    assert kept.living == []


@pytest.mark.parametrize("lives", [False, True])
async def test_a_misbehaving_zygote_is_ended_and_its_author_gets_an_error(kept: Kept, lives: bool) -> None:
    if lives:
        await kept.started()
    kept.factory.zygote.why_to_end = "it forks"
    for _ in range(FREE + 1):
        kept.isolates.watch()
    assert kept.factory.zygote.failed == ["it forks"] * (FREE + 1)
    assert {(fault.code, fault.message) for fault in kept.told} == {
        ("packages", "the function 'f' was ended: it forks")
    }
    now = asyncio.get_running_loop().time()
    assert (kept.isolates.restarts.pause_s(now) > 0) is not lives, "the ends of living isolates are counted instead"


async def test_a_request_takes_the_isolate_that_was_forked_before_it(kept: Kept) -> None:
    now = asyncio.get_running_loop().time()
    assert kept.isolates.wants_spare(now)
    kept.isolates.fork_spare()
    await settle()
    spare = kept.factory.made[0]
    assert (kept.living, kept.isolates.num_started, kept.isolates.wants_spare(now)) == ([], 0, False)
    kept.isolates.watch()
    assert spare.looks == ["idle"], "packages may compute in it"
    assert [await kept.started(), await kept.started()] == kept.factory.made == kept.living
    assert [isolate.num_loads for isolate in kept.living] == [1, 1]
    assert spare is kept.living[0]
    assert kept.isolates.num_started == 2


async def test_an_isolate_on_probation_is_forked_for_the_request(kept: Kept) -> None:
    kept.isolates.fork_spare()
    await settle()
    kept.isolates.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=True)
    assert await kept.started() is kept.factory.made[1]
    await settle()
    assert (kept.factory.made[0].is_closed, kept.factory.probations) == (True, [False, True])
    assert not kept.isolates.wants_spare(asyncio.get_running_loop().time() + 1.0)


async def test_no_spare_isolate_is_forked_beside_a_start_or_beyond_the_limit(kept: Kept) -> None:
    isolate = await kept.started()
    later = asyncio.get_running_loop().time() + 10.0
    isolate.is_ready = False
    assert not kept.isolates.wants_spare(later)
    isolate.is_ready = True
    assert kept.isolates.wants_spare(later)
    for _ in range(LIMITS.max_isolates - 1):
        await kept.started()
    assert not kept.isolates.wants_spare(later)


async def test_when_a_version_is_closed_all_have_ended(kept: Kept) -> None:
    made = [await kept.started() for _ in range(3)]
    await kept.isolates.close()
    assert (kept.living, [isolate.is_closed for isolate in made]) == ([], [True] * 3)
    assert kept.isolates.spent_cpu_s() == 4.5
