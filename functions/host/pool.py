"""One version of a function, with as many isolates as its load needs, or none.

The pool chooses an isolate for each request, and has one started if none is free; isolate_set.py manages the isolates. A version owns its bindings
and its accepted work: after it is replaced, it is closed once that work has ended.
"""

import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import ExchangeResult
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.author_reports import AuthorReports
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.invocations.invocation import Invocation
from pilotlight.functions.host.invocations.invocation_log import FunctionJournal
from pilotlight.functions.host.isolates.isolate_factory import IsolateFactory
from pilotlight.functions.host.isolates.isolate_handle import STOPPED, IsolateHandle
from pilotlight.functions.host.isolates.isolate_set import IsolateSet
from pilotlight.functions.host.packages import Packages
from pilotlight.functions.host.subrequests import Dial
from pilotlight.functions.host.waiters import Waiters
from pilotlight.functions.host.zygotes.pool_zygote import PoolContext
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError

log = logging.getLogger("pilotlight.function")
ObjectAddress = tuple[str, str]  # class and id of a Durable Object


class OpenBindings(Protocol):
    """The part of a function's open bindings (functions/function_bindings.py) that a pool uses."""

    async def answer(self, call: frames.BindingCall, body: AsyncIterator[bytes] | None = None) -> Any: ...

    async def static(self, method: str, url: str, headers: list[tuple[str, str]]) -> Any:
        """Return the response of an asset for this request; None if there is none."""

    @property
    def moves(self) -> tuple[str, ...]:
        """The tags of migrations that will rename or delete classes of objects when the version starts."""

    async def migrate_databases(self) -> None:
        """Apply the pending migrations of the D1 databases. Raises Failure."""

    def start(self, ask: Callable[[frames.FunctionEvent], Awaitable[ExchangeResult]]) -> None:
        """Start the queue consumers and cron triggers, and apply the migrations of objects.
        `ask` sends an event to this version."""

    def stop(self) -> None:
        """Take no more messages and firings; finish those in progress."""

    async def close(self) -> None: ...


class FunctionPool:
    def __init__(
        self,
        manifest: Manifest,
        limits: FunctionLimits,
        context: PoolContext,
        on_subrequest: Callable[["FunctionPool", frames.Request | Dial, Inbound | None], Awaitable[Any]],
        *,
        layers: tuple[Path, ...] = (),
        packages: Callable[[], Awaitable[Path | None]] | None = None,
        journal: FunctionJournal,
        follow: Callable[[str], None] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`packages` installs the dependencies and returns their layer; `release` releases the layer."""
        self.manifest = manifest
        self.bindings: OpenBindings | None = None
        self.release = release
        self._num_open = 0  # requests until their streams have ended, and scopes of `held`
        self._objects: Counter[ObjectAddress] = Counter()  # objects with open calls in this version
        self.num_asked = self.num_failed = 0
        self.waiters = Waiters(manifest.name, limits.max_waiting)
        self._journal = journal
        self.reports = AuthorReports(manifest.name, limits.log_kib_per_s, follow, journal.printed)
        self._packages = Packages(manifest, layers, packages)
        self.factory = IsolateFactory(
            manifest, limits, context, self._packages, partial(on_subrequest, self), self.reports
        )
        self.isolates = IsolateSet(manifest.name, self.factory, self.reports, self.waiters)

    def own(self, bindings: OpenBindings) -> None:
        """Set the version's bindings, which are closed together with it."""
        self.bindings = bindings

    @property
    def is_at_work(self) -> bool:
        """Tell whether accepted work is open: requests, streams, background work; not WebSockets."""
        return bool(self._num_open) or self.isolates.is_at_work

    def last_lines(self) -> list[str]:
        """Return the last lines that its isolates have printed."""
        return [line for isolate in self.isolates.living for line in isolate.process.log.last()]

    @property
    def classes(self) -> frozenset[str]:
        """Names of the classes of its Durable Objects and workflows."""
        return frozenset(
            str(each.options["class_name"]) for each in self.manifest.bindings if "class_name" in each.options
        )

    def is_home_of(self, object: ObjectAddress) -> bool:
        """Tell whether the object is in use here, so that no other version may start its instance."""
        return object in self._objects or self.isolates.are_at_work_for(object)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a scope in which the version stays open, even if it is replaced."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def ask(
        self, event: frames.FunctionEvent, body: AsyncIterator[bytes] | None = None, *, is_socket: bool = False
    ) -> ExchangeResult:
        """Send an event to an isolate and return its result.

        Raises Fault if the function failed, Failure if no isolate is free. All Durable Objects live in the oldest isolate. A GET or HEAD request is
        repeated once in another isolate if a signal stopped the first one's process.
        """
        self.num_asked += 1
        is_repeatable = body is None and _is_repeatable(event)
        while True:
            try:
                return await self._ask(event, body, is_socket=is_socket)
            except Fault as fault:
                if fault.code != STOPPED or not is_repeatable:
                    self.num_failed += 1
                    raise
                is_repeatable = False

    async def _ask(
        self, event: frames.FunctionEvent, body: AsyncIterator[bytes] | None, *, is_socket: bool
    ) -> ExchangeResult:
        invocation = self._journal.begin(event)
        try:
            result = await self._handled(event, body, invocation, is_socket=is_socket)
        except BaseException as error:
            invocation.end(error)
            raise
        invocation.answered(result.value)
        if result.body is None:
            invocation.end()
        return result

    async def _handled(
        self,
        event: frames.FunctionEvent,
        body: AsyncIterator[bytes] | None,
        invocation: Invocation,
        *,
        is_socket: bool,
    ) -> ExchangeResult:
        object = object_of(event)
        with ExitStack() as work:
            work.enter_context(self.held())
            if object is not None:
                work.enter_context(self._occupied(object))
            await self._packages.install()
            isolate = await (self.acquire(is_socket) if object is None else self.acquire_oldest())
            if is_socket and isolate.work.sockets >= self.factory.limits.sockets:
                sentence = f"{self.manifest.name!r} has reached its limit of open WebSockets"
                raise Failure(sentence, code="overloaded", status=503)
            isolate.work.has_objects = isolate.work.has_objects or object is not None
            try:
                on_end = work.pop_all().close
                return await isolate.ask(event, body, invocation=invocation, is_socket=is_socket, on_end=on_end)
            except Fault as fault:
                self.isolates.failed(isolate, fault)
                raise
            finally:
                self.waiters.notify()

    async def prepare(self) -> None:
        """Install packages and import them in a zygote at deployment, so that no request has to wait for it."""
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
        if self.bindings is not None:
            await self.bindings.close()  # may end dynamic workers that the function loaded
        self.release()

    @contextmanager
    def _occupied(self, object: ObjectAddress) -> Iterator[None]:
        self._objects[object] += 1
        try:
            yield
        finally:
            self._objects[object] -= 1
            if not self._objects[object]:
                del self._objects[object]

    async def acquire(self, is_socket: bool) -> IsolateHandle:
        limits = self.factory.limits
        while True:
            usable = self.isolates.usable
            open_ones = [isolate for isolate in usable if isolate.work.load < limits.concurrency]
            may_start = len(usable) < limits.max_isolates and not self.waiters.is_closed
            best = min(open_ones, key=lambda isolate: (isolate.lags, isolate.work.load), default=None)
            if is_socket and open_ones:  # WebSockets stay open for long, so they are spread over isolates
                best = min(open_ones, key=lambda isolate: (isolate.lags, isolate.work.sockets, isolate.work.load))
                may_start = may_start and (best.work.sockets >= limits.sockets or best.lags)
                best = best if not may_start else None
            if may_start and (best is None or best.lags):
                if (started := await self.isolates.start()) is not None:
                    return started
            elif best is None:
                await self.waiters.wait()
            elif await is_started(best):
                return best

    async def acquire_oldest(self) -> IsolateHandle:
        while True:
            usable = self.isolates.usable
            if not usable:
                if (started := await self.isolates.start()) is not None:
                    return started
            elif await is_started(usable[0]):
                return usable[0]


def object_of(event: frames.FunctionEvent) -> ObjectAddress | None:
    """Return the Durable Object that an event is for; None if it is for none."""
    options = event.options if isinstance(event, frames.FetchEvent | frames.RpcEvent) else {}
    return (str(options["object"]), str(options.get("id", ""))) if "object" in options else None


def _is_repeatable(event: frames.FunctionEvent) -> bool:
    return isinstance(event, frames.FetchEvent) and event.method in ("GET", "HEAD") and object_of(event) is None


async def is_started(isolate: IsolateHandle) -> bool:
    """Wait until an isolate has started, counted as one of its requests; return whether it is usable."""
    if not isolate.started.is_set():
        isolate.work.num_waiting += 1
        try:
            await isolate.started.wait()
        finally:
            isolate.work.num_waiting -= 1
    return isolate.is_usable


assert sys.platform == "linux", "isolates need Linux"
