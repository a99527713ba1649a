"""FunctionPool: one version of one function, with as many isolates as it needs now: none while nobody asks, several while they are busy.

Chooses an isolate for each request and starts one where none is free. What isolates are made from is isolate_factory.py's; what an isolate asks for
is answered by `on_subrequest`.
"""

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path

from runtime.functions.channel import ExchangeResult, Failure, frames
from runtime.functions.host.author_reports import AuthorReports
from runtime.functions.host.faults import Fault
from runtime.functions.host.isolate_factory import IsolateFactory
from runtime.functions.host.isolate_handle import IsolateHandle
from runtime.functions.host.limits import FunctionLimits
from runtime.functions.host.packages import Packages
from runtime.functions.host.pool_zygote import PoolContext, PoolZygote
from runtime.functions.host.restarts import MAX_WAIT_S, Restarts
from runtime.functions.host.subrequests import SubrequestHandler
from runtime.functions.host.waiters import Waiters
from runtime.functions.host.zygote_client import ZygoteError
from runtime.functions.manifest import Manifest

log = logging.getLogger("pilotlight.function")

LAG_S = 0.1  # a loop that is silent for so long is busy: another isolate takes the next request


class FunctionPool:
    def __init__(
        self,
        manifest: Manifest,
        limits: FunctionLimits,
        context: PoolContext,
        on_subrequest: SubrequestHandler,
        *,
        layers: tuple[Path, ...] = (),
        packages: Callable[[], Awaitable[Path | None]] | None = None,
        follow: Callable[[str], None] | None = None,
    ) -> None:
        """`packages` does what must be done before the function runs, and gives the layer of what it depends on."""
        self.manifest = manifest
        self.isolates: list[IsolateHandle] = []
        self.is_closing = False
        self.num_started = self.num_asked = self.num_failed = 0
        self.restarts = Restarts()
        self.reports = AuthorReports(manifest.name, limits.log_kib_per_s, follow)
        self.waiters = Waiters(manifest.name, limits.max_waiting)
        self._not_imported: Fault | None = None  # what came of the last try
        self._gone_cpu_s = 0.0  # of isolates that are gone
        self._told_cpu_s = 0.0
        self._notify = context.notify
        self._packages = Packages(manifest, layers, packages)
        self._factory = IsolateFactory(manifest, limits, context, self._packages, on_subrequest, self.reports)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def limits(self) -> FunctionLimits:
        return self._factory.limits

    @property
    def zygote(self) -> PoolZygote:
        return self._factory.zygote

    async def ask(
        self,
        event: frames.FunctionEvent,
        body: AsyncIterator[bytes] | None = None,
        *,
        is_pinned: bool = False,
        is_socket: bool = False,
    ) -> ExchangeResult:
        """Have an isolate handle an event. `is_pinned`: the function's oldest isolate answers, since objects of which there is one live there. Raises
        Fault."""
        self.num_asked += 1
        await self._packages.install()
        self._notify()
        isolate = await (self._acquire_oldest() if is_pinned else self._acquire(is_socket))
        if is_socket and isolate.sockets >= self.limits.sockets:
            sentence = f"{self.manifest.name!r} has as many WebSockets open as it may"
            raise Failure(sentence, code="overloaded", status=503)
        isolate.work.has_objects = isolate.work.has_objects or is_pinned
        try:
            return await isolate.ask(event, body, is_socket=is_socket)
        except Fault as fault:
            self.num_failed += 1
            self._failed(isolate, fault)
            raise
        finally:
            self.waiters.notify()

    def watch(self) -> bool:
        """Look at zygote and isolates once. Returns whether there is work."""
        is_busy = False
        now = asyncio.get_running_loop().time()
        if why := self.zygote.watch(is_asleep=not self.isolates):
            self._end_zygote(why)
        for isolate in tuple(self.isolates):
            if isolate.load or isolate.work.background or not isolate.is_ready:
                is_busy = True
                isolate.watch()
            elif isolate.is_retiring or (not isolate.sockets and now - isolate.work.idle_since > self.limits.idle_s):
                self._retire(isolate)
            elif isolate.sockets:
                isolate.watch()
            else:
                isolate.watch_idle()
        self._factory.enforce_disk(self.isolates)
        return is_busy

    def spent_cpu_s(self) -> float:
        """Return the processor time of its isolates since this was asked last."""
        total_s = self._gone_cpu_s + sum(isolate.watcher.total_s for isolate in self.isolates)
        spent_s, self._told_cpu_s = total_s - self._told_cpu_s, total_s
        return spent_s

    async def prepare(self) -> None:
        """Do at deployment what no request should wait for: packages are installed, and a zygote has imported them."""
        try:
            await self._packages.install()
            if not self.is_closing:
                await self._factory.prepare()
        except (Fault, ZygoteError, OSError) as error:
            log.warning("%s: %s", self.manifest.name, getattr(error, "detail", "") or error)

    def _end_zygote(self, why: str) -> None:
        """End the zygote, and with it all isolates, which may run what it runs."""
        self.zygote.fail(why)
        if not self.isolates:  # else their ends are counted
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=False)
        self.reports.tell(
            Fault(f"the function {self.manifest.name!r} was ended: {why}", code="packages", name="LimitExceeded")
        )

    def _failed(self, isolate: IsolateHandle, fault: Fault) -> None:
        self.reports.tell(fault)
        if fault.code == "import_failed":
            self._not_imported = fault
            self._taint(isolate)
        elif fault.name == "MemoryError" and not isolate.sockets and not isolate.work.has_objects:
            self._taint(isolate)  # whatever it was doing, a part of it may be missing

    def _taint(self, isolate: IsolateHandle) -> None:
        """Replace an isolate: it answers what it has taken, and the next request gets another one."""
        if isolate in self.isolates and not isolate.is_tainted:
            isolate.is_tainted = isolate.is_retiring = True
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=isolate.has_answered)

    @property
    def load(self) -> int:
        return sum(isolate.load for isolate in self.isolates)

    @property
    def sockets(self) -> int:
        return sum(isolate.sockets for isolate in self.isolates)

    async def close(self) -> None:
        self.is_closing = True
        for isolate in tuple(self.isolates):
            self._retire(isolate)
        while self._tasks:
            await asyncio.gather(*tuple(self._tasks), return_exceptions=True)
        await self._factory.close()

    async def _acquire(self, is_socket: bool = False) -> IsolateHandle:
        while True:
            usable = [isolate for isolate in self.isolates if _may_take(isolate)]
            open_ones = [isolate for isolate in usable if isolate.load < self.limits.concurrency]
            may_start = len(usable) < self.limits.max_isolates and not self.is_closing
            best = min(open_ones, key=lambda isolate: (lags(isolate), isolate.load), default=None)
            if is_socket and open_ones:  # which stay for long: they are spread
                best = min(open_ones, key=lambda isolate: (lags(isolate), isolate.sockets, isolate.load))
                may_start = may_start and (best.sockets >= self.limits.sockets or lags(best))
                best = best if not may_start else None
            if may_start and (best is None or lags(best)):
                if await self._paused():
                    continue
                return await self._start()
            if best is None:
                await self._wait()
            elif await _is_started(best):
                return best

    async def _acquire_oldest(self) -> IsolateHandle:
        while True:
            usable = [isolate for isolate in self.isolates if _may_take(isolate)]
            if not usable:
                if await self._paused():
                    continue
                return await self._start()
            if await _is_started(usable[0]):
                return usable[0]

    async def _paused(self) -> bool:
        """Tell whether the next isolate had to be waited for. Raises Failure where that would take too long or be in vain."""
        pause_s = self.restarts.pause_s(asyncio.get_running_loop().time())
        if pause_s <= 0:
            return False
        if (last := self._not_imported) is not None:  # the author has been told
            raise Fault(last.message, code=last.code, name=last.name, detail=last.detail)
        if pause_s > MAX_WAIT_S:
            sentence = f"the processes of {self.manifest.name!r} end one after the other without an answer; the next one starts in {pause_s:.0f} s"
            raise Failure(sentence, code="overloaded", status=503, retry_after_s=math.ceil(pause_s))
        await self._wait(pause_s)
        return True

    async def _wait(self, most_s: float | None = None) -> None:
        if self.is_closing:
            raise Fault(f"the function {self.manifest.name!r} is being replaced", code="closing")
        await self.waiters.wait(most_s)

    async def _start(self) -> IsolateHandle:
        is_on_probation = self.restarts.is_on_probation(asyncio.get_running_loop().time())
        is_on_probation = is_on_probation or any(
            isolate.process.is_deprioritized or lags(isolate) for isolate in self.isolates
        )
        self._not_imported = None
        isolate = self._factory.new(self._failed, is_on_probation=is_on_probation)
        self.isolates.append(isolate)
        try:
            await self._factory.start(isolate, is_on_probation=is_on_probation)
        except (ZygoteError, OSError) as error:
            self._retire(isolate)
            self.waiters.notify()
            raise Fault(f"the function {self.manifest.name!r} cannot be started: {error}", code="no_isolate") from None
        except BaseException:  # the client left at this very moment
            self._retire(isolate)
            self.waiters.notify()
            raise
        self.num_started += 1
        self._keep(self._attend(isolate))
        return isolate

    def _retire(self, isolate: IsolateHandle) -> None:
        if isolate in self.isolates:
            self._remove(isolate)
            self._keep(isolate.close())

    def _remove(self, isolate: IsolateHandle) -> None:
        isolate.watcher.last_look()
        self._gone_cpu_s += isolate.watcher.total_s
        self.isolates.remove(isolate)

    async def _attend(self, isolate: IsolateHandle) -> None:
        """Wait until the isolate is gone by itself, and clean up."""
        await isolate.until_gone()
        if isolate in self.isolates:
            if not isolate.is_tainted:  # which has been counted
                now = asyncio.get_running_loop().time()
                self.restarts.ended_badly(now, had_answered=isolate.has_answered)
            self._remove(isolate)
            await isolate.close()
        self.waiters.notify()

    def _keep(self, work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def lags(isolate: IsolateHandle) -> bool:
    return isolate.watcher.probe.silent_s() > LAG_S


def _may_take(isolate: IsolateHandle) -> bool:
    """Tell whether an isolate may take requests. One that is only now being started counts: two requests at once must not start two."""
    return not isolate.is_retiring and (isolate.is_usable or not isolate.started.is_set())


async def _is_started(isolate: IsolateHandle) -> bool:
    """Wait until an isolate has started, as one of its requests. Returns whether it can take them."""
    if not isolate.started.is_set():
        isolate.work.num_waiting += 1
        try:
            await isolate.started.wait()
        finally:
            isolate.work.num_waiting -= 1
    return isolate.is_usable


assert sys.platform == "linux", "isolates need Linux"
