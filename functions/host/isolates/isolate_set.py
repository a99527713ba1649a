"""The isolates of one version: starts, watches and retires them, with pauses after failures.

isolate_factory.py makes them; pool.py chooses one for a request.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.author_reports import AuthorReports
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.isolates.isolate_factory import IsolateFactory
from pilotlight.functions.host.isolates.isolate_handle import IsolateHandle
from pilotlight.functions.host.isolates.restarts import MAX_WAIT_S, Restarts
from pilotlight.functions.host.isolates.spare_isolate import SpareIsolate
from pilotlight.functions.host.waiters import Waiters
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError

log = logging.getLogger("pilotlight.function")


class IsolateSet:
    def __init__(self, function: str, factory: IsolateFactory, reports: AuthorReports, waiters: Waiters) -> None:
        """`waiters` are notified of every failed start and every end."""
        self.living: list[IsolateHandle] = []  # oldest first
        self.num_started = 0
        self.restarts = Restarts()
        self._function = function
        self._factory = factory
        self._reports = reports
        self._waiters = waiters
        self._not_imported: Fault | None = None  # the import error of the last attempt
        self._gone_cpu_s = 0.0  # CPU time of ended isolates
        self._told_cpu_s = 0.0
        self._spare = SpareIsolate(factory, self.failed)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> list[IsolateHandle]:
        """Return the isolates that may take requests.
        An isolate that is starting counts, so that two simultaneous requests do not start two."""
        return [
            isolate
            for isolate in self.living
            if not isolate.is_retiring and (isolate.is_usable or not isolate.started.is_set())
        ]

    @property
    def load(self) -> int:
        return sum(isolate.work.load for isolate in self.living)

    @property
    def sockets(self) -> int:
        return sum(isolate.work.sockets for isolate in self.living)

    @property
    def is_at_work(self) -> bool:
        return any(isolate.work.load or isolate.work.background for isolate in self.living)

    def are_at_work_for(self, object: tuple[str, str]) -> bool:
        """Tell whether this Durable Object (class, id) has unfinished background work."""
        return any(object in isolate.work.objects for isolate in self.living)

    def wants_spare(self, now: float) -> bool:
        """Tell whether a spare isolate should be forked now: all isolates have started, and none ended badly."""
        return (
            self._spare.is_wanted(now)
            and len(self.living) < self._factory.limits.max_isolates
            and all(isolate.is_ready for isolate in self.living)
            and not self.restarts.is_on_probation(now)
        )

    @property
    def has_spare(self) -> bool:
        return self._spare.exists

    def fork_spare(self) -> None:
        self._keep(self._spare.run())

    def end_spare(self) -> None:
        self._keep(self._spare.close())

    async def start(self) -> IsolateHandle | None:
        """Start an isolate; or, if a pause is due before the next start, wait for its end and return None.
        Raises Fault if it cannot start, and Failure if the pause is too long to wait."""
        now = asyncio.get_running_loop().time()
        if (pause_s := self.restarts.pause_s(now)) > 0:
            await self._pause(pause_s)
            return None
        is_on_probation = self.restarts.is_on_probation(now)
        is_on_probation |= any(isolate.process.is_deprioritized or isolate.lags for isolate in self.living)
        self._not_imported = None
        if is_on_probation:
            self.end_spare()  # it has another priority
        spare = None if is_on_probation else self._spare.take(now)
        isolate = spare or self._factory.new(self.failed, is_on_probation=is_on_probation)
        self.living.append(isolate)
        try:
            if spare is None:
                await self._factory.start(isolate, is_on_probation=is_on_probation)
            isolate.load()
        except BaseException as error:  # including the cancellation of the request that needs it
            self._retire(isolate)
            self._waiters.notify()
            if isinstance(error, ZygoteError | OSError):
                sentence = f"the function {self._function!r} cannot be started: {error}"
                raise Fault(sentence, code="no_isolate") from None
            raise
        self.num_started += 1
        self._keep(self._attend(isolate))
        return isolate

    def watch(self) -> bool:
        """Check the zygote and all isolates once; return whether there is work."""
        is_busy = False
        now = asyncio.get_running_loop().time()
        if why := self._factory.zygote.watch(is_asleep=not self.living):
            self._end_zygote(why)
        for isolate in tuple(self.living):
            try:
                is_busy = self._look(isolate, now) or is_busy
            except Exception:  # an isolate that cannot be measured would have no limits
                log.exception("%s: an isolate cannot be measured and is ended", self._function)
                isolate.end("its usage cannot be measured", "unwatched")
        self._spare.watch()
        self._factory.enforce_disk([isolate for isolate in self.living if isolate.is_usable])
        return is_busy

    def _look(self, isolate: IsolateHandle, now: float) -> bool:
        """Check one isolate, or retire it; return whether it has work."""
        if isolate.work.load or isolate.work.background or not isolate.is_ready:
            isolate.watch()
            return True
        if isolate.is_retiring or (
            not isolate.work.sockets and now - isolate.work.idle_since > self._factory.limits.idle_s
        ):
            self._retire(isolate)
        elif isolate.work.sockets:
            isolate.watch()
        else:
            isolate.watch_idle()
        return False

    def failed(self, isolate: IsolateHandle, fault: Fault) -> None:
        """Report a failed request to the author, and replace the isolate if it may be damaged."""
        self._reports.tell(fault)
        if fault.code == "import_failed":
            self._not_imported = fault
            self._taint(isolate)
        elif fault.name == "MemoryError" and not isolate.work.sockets and not isolate.work.has_objects:
            self._taint(isolate)  # interrupted code may have left inconsistent data

    def spent_cpu_s(self) -> float:
        """Return the isolates' CPU time in seconds since the last call."""
        total_s = self._gone_cpu_s + sum(isolate.watcher.total_s for isolate in self.living)
        spent_s, self._told_cpu_s = total_s - self._told_cpu_s, total_s
        return spent_s

    def close_sockets(self) -> None:
        """Close all WebSockets; clients that reconnect get the current version."""
        for isolate in self.living:
            for stream in tuple(isolate.work.open_sockets):
                stream.end(Fault(f"the function {self._function!r} is being replaced", code="closing"))

    async def close(self) -> None:
        await self._spare.close()
        for isolate in tuple(self.living):
            self._retire(isolate)
        while self._tasks:
            await asyncio.gather(*tuple(self._tasks), return_exceptions=True)

    async def _pause(self, pause_s: float) -> None:
        """Wait until the next isolate may start.
        Raises Fault if the last import failed, and Failure if the pause is too long to wait."""
        if (last := self._not_imported) is not None:  # reported to the author already
            raise Fault(last.message, code=last.code, name=last.name, detail=last.detail)
        if pause_s > MAX_WAIT_S:
            sentence = f"the processes of {self._function!r} keep ending without an answer; the next one starts in {pause_s:.0f} s"
            raise Failure(sentence, code="overloaded", status=503, retry_after_s=math.ceil(pause_s))
        await self._waiters.wait(pause_s)

    def _end_zygote(self, why: str) -> None:
        """End the zygote and with it all isolates, which may run the same code."""
        self._factory.zygote.fail(why)
        if not self.living:  # if there are isolates, `_attend` counts their ends
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=False)
        sentence = f"the function {self._function!r} was ended: {why}"
        self._reports.tell(Fault(sentence, code="packages", name="LimitExceeded"))

    def _taint(self, isolate: IsolateHandle) -> None:
        """Retire an isolate: it finishes its requests, and new requests go to other isolates."""
        if isolate in self.living and not isolate.is_tainted:
            isolate.is_tainted = isolate.is_retiring = True
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=isolate.has_answered)

    def _retire(self, isolate: IsolateHandle) -> None:
        if isolate in self.living:
            self._remove(isolate)
            self._keep(isolate.close())

    def _remove(self, isolate: IsolateHandle) -> None:
        isolate.watcher.last_look()
        self._gone_cpu_s += isolate.watcher.total_s
        self.living.remove(isolate)

    async def _attend(self, isolate: IsolateHandle) -> None:
        """Wait until an isolate ends by itself, then clean up."""
        await isolate.until_gone()
        if isolate in self.living:
            if not isolate.is_tainted:  # `_taint` has counted a tainted one
                now = asyncio.get_running_loop().time()
                self.restarts.ended_badly(now, had_answered=isolate.has_answered)
            self._remove(isolate)
            await isolate.close()
        self._waiters.notify()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
