"""FunctionPool: one version of one function, with as many isolates as it needs now: none while nobody asks, several while they are busy.

Chooses an isolate for each request and has one started where none is free; how isolates come and go is isolate_set.py's. What an isolate asks for
is answered by `on_subrequest`.
"""

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from runtime.functions.channel import ExchangeResult, Failure, frames
from runtime.functions.host.author_reports import AuthorReports
from runtime.functions.host.faults import Fault
from runtime.functions.host.isolate_factory import IsolateFactory
from runtime.functions.host.isolate_handle import IsolateHandle
from runtime.functions.host.isolate_set import IsolateSet
from runtime.functions.host.limits import FunctionLimits
from runtime.functions.host.packages import Packages
from runtime.functions.host.pool_zygote import PoolContext
from runtime.functions.host.subrequests import SubrequestHandler
from runtime.functions.host.waiters import Waiters
from runtime.functions.host.zygote_client import ZygoteError
from runtime.functions.manifest import Manifest

log = logging.getLogger("pilotlight.function")


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
        self.num_asked = self.num_failed = 0
        self.waiters = Waiters(manifest.name, limits.max_waiting)
        self.reports = AuthorReports(manifest.name, limits.log_kib_per_s, follow)
        self._packages = Packages(manifest, layers, packages)
        self.factory = IsolateFactory(manifest, limits, context, self._packages, on_subrequest, self.reports)
        self.isolates = IsolateSet(manifest.name, self.factory, self.reports, self.waiters)

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
        isolate = await (self._acquire_oldest() if is_pinned else self._acquire(is_socket))
        if is_socket and isolate.work.sockets >= self.factory.limits.sockets:
            sentence = f"{self.manifest.name!r} has as many WebSockets open as it may"
            raise Failure(sentence, code="overloaded", status=503)
        isolate.work.has_objects = isolate.work.has_objects or is_pinned
        try:
            return await isolate.ask(event, body, is_socket=is_socket)
        except Fault as fault:
            self.num_failed += 1
            self.isolates.failed(isolate, fault)
            raise
        finally:
            self.waiters.notify()

    def use_values(self, manifest: Manifest) -> None:
        """Have the function run with other values of its bindings from its next request on; what is under way ends with the old ones."""
        self.manifest = manifest
        self.factory.use_values(manifest)
        self.isolates.replace_all()

    async def prepare(self) -> None:
        """Do at deployment what no request should wait for: packages are installed, and a zygote has imported them."""
        try:
            await self._packages.install()
            if not self.waiters.is_closed:
                await self.factory.prepare()
        except (Fault, ZygoteError, OSError) as error:
            log.warning("%s: %s", self.manifest.name, getattr(error, "detail", "") or error)

    async def close(self) -> None:
        self.waiters.close()
        await self.isolates.close()
        await self.factory.close()

    async def _acquire(self, is_socket: bool) -> IsolateHandle:
        limits = self.factory.limits
        while True:
            usable = self.isolates.usable
            open_ones = [isolate for isolate in usable if isolate.work.load < limits.concurrency]
            may_start = len(usable) < limits.max_isolates and not self.waiters.is_closed
            best = min(open_ones, key=lambda isolate: (isolate.lags, isolate.work.load), default=None)
            if is_socket and open_ones:  # which stay for long: they are spread
                best = min(open_ones, key=lambda isolate: (isolate.lags, isolate.work.sockets, isolate.work.load))
                may_start = may_start and (best.work.sockets >= limits.sockets or best.lags)
                best = best if not may_start else None
            if may_start and (best is None or best.lags):
                if (started := await self.isolates.start()) is not None:
                    return started
            elif best is None:
                await self.waiters.wait()
            elif await _is_started(best):
                return best

    async def _acquire_oldest(self) -> IsolateHandle:
        while True:
            usable = self.isolates.usable
            if not usable:
                if (started := await self.isolates.start()) is not None:
                    return started
            elif await _is_started(usable[0]):
                return usable[0]


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
