"""FunctionPool: one version of one function, with as many isolates as it needs now: none while nobody asks, several while they are busy.

Chooses an isolate for each request and starts one where none is free. Knows the manifest and the limits; what leaves an isolate is `outward`'s.
"""

import asyncio
import itertools
import logging
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from runtime.functions.channel import Failure, Result, frames
from runtime.functions.host import priority
from runtime.functions.host.confinement import Confinement
from runtime.functions.host.control_messages import Boot
from runtime.functions.host.faults import Fault
from runtime.functions.host.imports import imports_of
from runtime.functions.host.isolate_handle import Outward, Worker
from runtime.functions.host.layers import LayerError
from runtime.functions.host.limits import Limits
from runtime.functions.host.logs import FunctionLog
from runtime.functions.host.pace import Pace
from runtime.functions.host.priority import Standing
from runtime.functions.host.restarts import MAX_WAIT_S, Restarts
from runtime.functions.host.zygote_client import FunctionZygote, Hatchery, ZygoteError
from runtime.functions.manifest import Manifest

log = logging.getLogger("pilotlight.function")
_numbers = itertools.count(1)

REFUSED_FOR_S = 20.0  # packages that could not be installed are not tried again at once
LAG_S = 0.1  # a loop that is silent for so long is busy: another isolate takes the next request
SETTLED_S = 3.0  # after which a function that sleeps has imported what it will
SCRATCH_S = 0.25  # between two looks at what tier 1 has written


@dataclass(frozen=True)
class Ground:
    """Where a function runs: what the site gives to each of them."""

    zygote: Hatchery
    tier: int
    uid: int | None
    scratch: Path
    stir: Callable[[], None]  # wakes those who watch


class FunctionPool:
    def __init__(
        self,
        manifest: Manifest,
        limits: Limits,
        ground: Ground,
        outward: Outward,
        *,
        layers: tuple[Path, ...] = (),
        packages: Callable[[], Awaitable[Path]] | None = None,
        follow: Callable[[str], None] | None = None,
    ) -> None:
        """`packages` gives the layer of what the function depends on, once it is installed."""
        self.manifest = manifest
        self.name = manifest.name
        self.limits = replace(limits, cpu_ms=min(limits.cpu_ms, manifest.cpu_ms or limits.cpu_ms))
        self._pace = Pace(self.limits.response_mib_per_s * 2**20)
        self.workers: list[Worker] = []
        self.is_closing = False
        self.num_started = 0
        self.restarts = Restarts()
        self._not_imported: Fault | None = None  # what came of the last try
        self._ground = ground
        self._outward = outward
        self._follow = follow
        self._scratch = ground.scratch / f"{manifest.name}-{next(_numbers)}"
        self._measuring: asyncio.Future[None] | None = None
        vendored = manifest.directory / "python_modules"
        self._layers = [str(path.resolve()) for path in (*layers, *((vendored,) if vendored.is_dir() else ()))]
        self._imports: list[str] | None = None  # of its files, once they have been read
        self._zygote: FunctionZygote | None = None
        self._zygote_log: FunctionLog | None = None
        self.asleep_since: float | None = None  # with its zygote in memory
        self.asleep_mib: int | None = (
            None  # what that holds, once it has imported what it will; measured once, for there may be thousands
        )
        self._packages = packages
        self._refused: tuple[float, Fault] | None = None
        self._freed = asyncio.Event()
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(
        self,
        frame: Callable[[int], frames.Request],
        body: AsyncIterator[bytes] | None = None,
        *,
        wall_s: float | None = None,
        is_pinned: bool = False,
        is_socket: bool = False,
    ) -> Result:
        """`is_pinned`: the function's oldest isolate answers, since objects of which there is one live there. Raises Fault."""
        await self._install()
        self._ground.stir()
        worker = await (self._oldest() if is_pinned else self._free(is_socket))
        if is_socket and worker.sockets >= self.limits.sockets:
            sentence = f"{self.name!r} has as many WebSockets open as it may"
            raise Failure(sentence, code="overloaded", status=503)
        worker.has_objects = worker.has_objects or is_pinned
        try:
            return await worker.ask(frame, body, wall_s or self.limits.wall_s, is_socket=is_socket)
        except Fault as fault:
            self._failed(worker, fault)
            raise
        finally:
            self._freed.set()

    def watch(self) -> bool:
        """Whether there is work to look after."""
        is_busy = False
        now = asyncio.get_running_loop().time()
        if self.workers or self._zygote is None:
            self.asleep_since = self.asleep_mib = None
        elif self.asleep_since is None:
            self.asleep_since = now
        elif self.asleep_mib is None and now - self.asleep_since > SETTLED_S:
            self.asleep_mib = self._zygote.memory_mib
        if self._zygote is not None and (why := self._zygote.why_ended(self.limits, is_asleep=not self.workers)):
            self._end_guilty(self._zygote, why)
        for worker in tuple(self.workers):
            if worker.load or worker.background or not worker.is_ready:
                is_busy = True
                worker.watch()
            elif worker.is_retiring or (not worker.sockets and now - worker.idle_since > self.limits.idle_s):
                self._retire(worker)
            elif worker.sockets:
                worker.watch()
            else:
                worker.watch_idle()
        if self.workers and self._ground.tier < 2 and (self._measuring is None or self._measuring.done()):
            self._measuring = self._keep(self._measure_scratch())
        return is_busy

    async def prepare(self) -> None:
        """What a deployment pays, so that no request does: packages are installed, and a zygote has imported them."""
        try:
            await self._install()
            if self._imports is None:
                self._imports = await asyncio.to_thread(imports_of, self.manifest)
            if (self._zygote is None or not self._zygote.is_alive) and not self.is_closing:
                self._hatch()
        except (Fault, ZygoteError, OSError) as error:
            log.warning("%s: %s", self.name, getattr(error, "detail", "") or error)

    def _end_guilty(self, zygote: FunctionZygote, why: str) -> None:
        """With all isolates, which may run what it runs."""
        zygote.fail(why)
        zygote.close()
        self._zygote = None
        if not self.workers:  # else their ends are counted
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=False)
        self._tell(Fault(f"the function {self.name!r} was ended: {why}", code="packages", name="LimitExceeded"))

    def _failed(self, worker: Worker, fault: Fault) -> None:
        self._tell(fault)
        if fault.code == "import_failed":
            self._not_imported = fault
            self._is_spoilt(worker)
        elif fault.name == "MemoryError" and not worker.sockets and not worker.has_objects:
            self._is_spoilt(worker)  # whatever it was doing, a part of it may be missing

    def _is_spoilt(self, worker: Worker) -> None:
        """It answers what it has taken, and the next request gets another one."""
        if worker in self.workers and not worker.is_spoilt:
            worker.is_spoilt = worker.is_retiring = True
            self.restarts.ended_badly(asyncio.get_running_loop().time(), had_answered=worker.has_answered)

    def _tell(self, fault: Fault) -> None:
        """The author, at the log and wherever it is followed. A client's leaving is no fault of the function's."""
        if fault.code == "cancelled":
            return
        log.warning("%s: %s", self.name, fault.detail or fault.message)
        if self._follow is not None:
            self._follow(fault.detail or fault.message)

    @property
    def load(self) -> int:
        return sum(worker.load for worker in self.workers)

    @property
    def sockets(self) -> int:
        return sum(worker.sockets for worker in self.workers)

    def end_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = self.asleep_since = self.asleep_mib = None
        if self._zygote_log is not None:
            self._zygote_log.close()
            self._zygote_log = None

    async def close(self) -> None:
        self.is_closing = True
        for worker in tuple(self.workers):
            self._retire(worker)
        while self._tasks:
            await asyncio.gather(*tuple(self._tasks), return_exceptions=True)
        self.end_zygote()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _measure_scratch(self) -> None:
        """Tier 2 has a file system of that size; at tier 1 somebody must look."""
        used = await asyncio.to_thread(bytes_below, self._scratch, self.limits.disk_mib << 20)
        if used > self.limits.disk_mib << 20:
            guilty = tuple(self.workers)
            for worker in guilty:
                worker.end(f"its files have more than {self.limits.disk_mib} MiB", "disk")
            await asyncio.gather(*(worker.until_gone() for worker in guilty))
            await asyncio.to_thread(empty, self._scratch)
        await asyncio.sleep(SCRATCH_S)

    async def _install(self) -> None:
        if self._packages is None:
            return
        now = asyncio.get_running_loop().time()
        if self._refused is not None and now < self._refused[0]:
            raise self._refused[1]
        try:
            layer = await self._packages()
        except LayerError as error:
            sentence = f"the packages of {self.name!r} cannot be installed"
            fault = Fault(sentence, code="dependencies", name="LayerError", detail=f"{sentence}:\n{error}")
            self._refused = now + REFUSED_FOR_S, fault
            raise fault from None
        if self._packages is not None:  # else another request was first
            self._packages = None
            self._layers.insert(0, str(layer.resolve()))

    async def _free(self, is_socket: bool = False) -> Worker:
        while True:
            usable = [worker for worker in self.workers if self._may_take(worker)]
            open_ones = [worker for worker in usable if worker.load < self.limits.concurrency]
            may_start = len(usable) < self.limits.max_isolates and not self.is_closing
            best = min(open_ones, key=lambda worker: (self._lags(worker), worker.load), default=None)
            if is_socket and open_ones:  # which stay for long: they are spread
                best = min(open_ones, key=lambda worker: (self._lags(worker), worker.sockets, worker.load))
                may_start = may_start and (best.sockets >= self.limits.sockets or self._lags(best))
                best = best if not may_start else None
            if may_start and (best is None or self._lags(best)):
                if await self._rested():
                    continue
                return await self._start()
            if best is None:
                await self._wait()
            elif await self._is_started(best):
                return best

    async def _oldest(self) -> Worker:
        while True:
            usable = [worker for worker in self.workers if self._may_take(worker)]
            if not usable:
                if await self._rested():
                    continue
                return await self._start()
            if await self._is_started(usable[0]):
                return usable[0]

    def _may_take(self, worker: Worker) -> bool:
        """One that is only now being started counts: two requests at once must not start two."""
        return not worker.is_retiring and (worker.is_usable or not worker.started.is_set())

    async def _is_started(self, worker: Worker) -> bool:
        if not worker.started.is_set():
            worker.promised += 1
            try:
                await worker.started.wait()
            finally:
                worker.promised -= 1
        return worker.is_usable

    def _lags(self, worker: Worker) -> bool:
        return worker.lag_since is not None and asyncio.get_running_loop().time() - worker.lag_since > LAG_S

    async def _rested(self) -> bool:
        """Whether the next isolate had to be waited for. Raises Failure where that would take too long or be in vain."""
        pause_s = self.restarts.pause_s(asyncio.get_running_loop().time())
        if pause_s <= 0:
            return False
        if (last := self._not_imported) is not None:  # the author has been told
            raise Fault(last.message, code=last.code, name=last.name, detail=last.detail)
        if pause_s > MAX_WAIT_S:
            sentence = f"the processes of {self.name!r} end one after the other without an answer; the next one starts in {pause_s:.0f} s"
            raise Failure(sentence, code="overloaded", status=503, retry_after_s=math.ceil(pause_s))
        await self._wait(pause_s)
        return True

    async def _wait(self, most_s: float | None = None) -> None:
        if self.is_closing:
            raise Fault(f"the function {self.name!r} is being replaced", code="closing")
        if self._waiting >= self.limits.max_waiting:
            raise Failure(f"all isolates of {self.name!r} are busy", code="overloaded", status=503)
        self._waiting += 1
        self._freed.clear()
        try:
            async with asyncio.timeout(most_s):
                await self._freed.wait()
        except TimeoutError:
            return
        finally:
            self._waiting -= 1

    async def _start(self) -> Worker:
        printed = FunctionLog(self.name, self.limits.log_kib_per_s, self._follow)
        is_on_probation = self.restarts.is_on_probation(asyncio.get_running_loop().time())
        is_on_probation = is_on_probation or any(worker.gives_way or self._lags(worker) for worker in self.workers)
        self._not_imported = None
        worker = Worker(
            self.name,
            self.limits,
            self._outward,
            printed,
            self._pace,
            is_on_probation=is_on_probation,
        )
        worker.on_fault = partial(self._failed, worker)
        self.workers.append(worker)
        try:
            if self._zygote is None or not self._zygote.is_alive:
                self._hatch()
            assert self._zygote is not None
            if priority.MAY_RETURN:
                self._zygote.stand(Standing.YIELDING if is_on_probation else Standing.USUAL)
            await worker.start(self._zygote, self._boot())
        except (ZygoteError, OSError) as error:
            self.workers.remove(worker)
            self._freed.set()
            raise Fault(f"the function {self.name!r} cannot be started: {error}", code="no_isolate") from None
        except BaseException:  # the client left at this very moment
            self._retire(worker)
            self._freed.set()
            raise
        self.num_started += 1
        self._keep(self._attend(worker))
        return worker

    def _hatch(self) -> None:
        self.end_zygote()
        ground, manifest = self._ground, self.manifest
        scratch = self._scratch
        if ground.tier < 2:  # else it has a file system of its own
            scratch.mkdir(parents=True, exist_ok=True)
            if ground.uid is not None:
                os.chown(scratch, ground.uid, ground.uid)
        limits = Confinement(
            tier=ground.tier,
            folder=str(manifest.directory),
            layers=self._layers,
            scratch=str(scratch.resolve()),
            uid=ground.uid,
            memory_mib=self.limits.memory_mib,
            disk_mib=self.limits.disk_mib,
            open_files=self.limits.open_files,
            threads=self.limits.threads,
            isolates=self.limits.max_isolates,
        )
        printed = self._zygote_log = FunctionLog(self.name, self.limits.log_kib_per_s, self._follow)
        try:
            if self._imports is None:
                self._imports = imports_of(manifest)
            self._zygote = ground.zygote.hatch(limits, self._imports, self._layers, printed.write_fd)
        finally:
            printed.given_away()

    def _boot(self) -> Boot:
        path = [str(self.manifest.main.parent), *self._layers]
        if self.manifest.main.parent != self.manifest.directory:
            path.insert(1, str(self.manifest.directory))
        hidden = ("directory",)
        bindings = [
            (binding.kind, binding.name, {key: value for key, value in binding.options.items() if key not in hidden})
            for binding in self.manifest.bindings
        ]
        return Boot(str(self.manifest.main), path, bindings)

    def _retire(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._keep(worker.close())

    async def _attend(self, worker: Worker) -> None:
        """Until the isolate is gone by itself."""
        await worker.until_gone()
        if worker in self.workers:
            if not worker.is_spoilt:  # which has been counted
                now = asyncio.get_running_loop().time()
                self.restarts.ended_badly(now, had_answered=worker.has_answered)
            self.workers.remove(worker)
            await worker.close()
        self._freed.set()

    def _keep(self, work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def bytes_below(folder: Path, enough: int) -> int:
    """What the files there take on the disk; not counted further than `enough`."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # gone already
        total += 512 * len(files)  # a file's own place, however empty
        if total > enough:
            break
    return total


def empty(folder: Path) -> None:
    """The folder itself stays: processes that live there have it mounted."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


assert sys.platform == "linux", "isolates need Linux"
