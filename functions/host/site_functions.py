"""All functions of a site, and the services that they reach: bindings, each other, and the network.

Use as `async with`. process_supply.py makes their processes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from msgspec.structs import replace

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import ExchangeResult, StreamingReply
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.answer_headers import checked_headers
from pilotlight.functions.host.dependencies.layers import Layers
from pilotlight.functions.host.invocations.invocation_log import FunctionJournal, InvocationLog
from pilotlight.functions.host.invocations.log_export import LogExport
from pilotlight.functions.host.invocations.log_store import LogStore
from pilotlight.functions.host.network.egress import Egress
from pilotlight.functions.host.pool import FunctionPool, ObjectAddress, OpenBindings, object_of
from pilotlight.functions.host.subrequests import Dial
from pilotlight.functions.host.tails import Tails
from pilotlight.functions.host.zygotes.process_supply import ProcessSupply
from pilotlight.functions.host.zygotes.zygote_budget import ZygoteBudget
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.confinement.isolation import Isolation
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import PriorityClass, apply_priority
from pilotlight.support import background

log = logging.getLogger("pilotlight.function")

WATCH_S = 0.05
OUTPUT_S = 0.3  # time in which an isolate's output arrives after its response
IDLE_S = 0.2  # added to the pause between checks while there is no work; a new request ends it early
TRIGGERS: dict[type[frames.FunctionEvent], str] = {  # trigger names of OpenTelemetry
    frames.FetchEvent: "http", frames.RpcEvent: "other", frames.QueueEvent: "pubsub", frames.ScheduledEvent: "timer",
    frames.TailEvent: "other",
}  # fmt: skip


class Response(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    stream: AsyncIterator[bytes] | None


# The version whose binding call is being answered.
_caller: ContextVar[FunctionPool | None] = ContextVar("_caller", default=None)
Opener = Callable[[Manifest, "SiteFunctions"], OpenBindings]
Trace = Callable[[str, str], AbstractContextManager[object]]  # opens a tracing span for a function's name and a trigger


class SiteFunctions:
    def __init__(
        self,
        *,
        limits: FunctionLimits | None = None,
        min_tier: int = 1,
        max_tier: int = 3,
        oci_runtime: str | None = None,
        state_dir: Path | None = None,
        egress_allow: Iterable[str] = (),
        own_ports: Callable[[], Iterable[int]] = lambda: (),
        open_bindings: Opener | None = None,
        zygotes_mib: int = 1024,
        layers: Layers | None = None,
        logs: LogStore | None = None,
        log_export: LogExport | None = None,
        on_cpu: Callable[[str, float], None] = lambda function, seconds: None,
        trace: Trace | None = None,
    ) -> None:
        """`logs` stores invocations, and `log_export` sends them to a collector; both are closed at the end.
        `on_cpu` is called with a function's name and its CPU seconds. `trace` opens the tracing scope of an invocation."""
        self.limits = limits or FunctionLimits()
        self.pools: dict[str, FunctionPool] = {}
        self.names: dict[str, str] = {}  # the live pool of each function that has several versions
        self.tails = Tails()
        self.invocations = InvocationLog(self.ask, logs, log_export)
        self._trace = trace or (lambda function, trigger: nullcontext())
        self._versions: dict[
            str, list[FunctionPool]
        ] = {}  # pools by function, including replaced ones that are not closed yet
        self._open_bindings = open_bindings
        self._on_cpu = on_cpu
        self._egress = Egress(tuple(egress_allow), lambda: tuple(own_ports()))
        self._supply = ProcessSupply((min_tier, max_tier), oci_runtime, state_dir, layers or Layers(Path()))
        self._zygote_budget = ZygoteBudget(zygotes_mib)
        self._stack = AsyncExitStack()
        self._unwatched: WeakSet[FunctionPool] = WeakSet()  # pools whose error was logged
        self._requested = asyncio.Event()  # wakes the watch
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def isolation(self) -> Isolation:
        return self._supply.isolation

    async def __aenter__(self) -> "SiteFunctions":
        async with AsyncExitStack() as stack:
            apply_priority(0, PriorityClass.INTERACTIVE)  # this thread's event loop relays all requests and responses
            stack.callback(apply_priority, 0, PriorityClass.NORMAL)
            stack.push_async_callback(self.invocations.close)
            await stack.enter_async_context(background.running(self.invocations.run, "the log of functions"))
            await stack.enter_async_context(self._supply)
            await stack.enter_async_context(self._egress)
            stack.push_async_callback(self._close_all)
            served = self.pools.values()
            preparing = partial(self._zygote_budget.prepare, lambda pool: pool in served)
            await stack.enter_async_context(background.running(self._watch, "the watch over functions' limits"))
            await stack.enter_async_context(background.running(preparing, "preparing functions"))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def add(self, manifest: Manifest, *, name: str | None = None, layers: tuple[Path, ...] = ()) -> None:
        """Serve a function from its next request on; it replaces a pool of the same name.

        If it cannot be started, the earlier pool stays. If `name` differs from the manifest's, the pool is one version of that function, and gets
        queues and cron triggers once it is `live`. `layers` are directories with its packages; without them, its dependencies are installed. Raises
        ManifestError, Failure.
        """
        served = name or manifest.name
        is_live = self.names.get(manifest.name) == served
        provision = self._supply.provide(served, manifest, layers)
        pool = FunctionPool(
            manifest,
            self.limits,
            provision.context,
            self._answer_subrequest,
            layers=layers,
            packages=provision.install,
            journal=FunctionJournal(self.invocations, manifest, served.partition("@")[2]),
            follow=partial(self.tails.publish, manifest.name),
            release=provision.release,
        )
        try:
            if self._open_bindings is not None:
                pool.own(self._open_bindings(manifest, self))
            if is_live or served == manifest.name:
                self._start(pool)
        except Exception:
            self._keep(pool.close())
            raise
        self.remove(served)
        self.pools[served] = pool
        if is_live:
            self.names[manifest.name] = served
        self._versions.setdefault(manifest.name, []).append(pool)
        provision.use()
        if provision.takes_long:
            self._keep(pool.prepare())
        else:
            self._zygote_budget.add(pool)

    def live(self, function: str, pool: str) -> None:
        """Make a version the live one: bindings, queues and cron triggers then use it.
        Raises Failure if it cannot be started; the live version then stays."""
        before = self.names.get(function)
        if before == pool:
            return
        if pool in self.pools:
            self._start(self.pools[pool])
        self.names[function] = pool
        if before in self.pools and (bindings := self.pools[before].bindings) is not None:
            bindings.stop()

    def remove(self, name: str) -> None:
        """Stop serving a pool. Accepted work may finish, for at most `wall_s`."""
        old = self.pools.pop(name, None)
        self.names = {plain: pool for plain, pool in self.names.items() if pool != name}
        if old is not None:
            if old.bindings is not None:
                old.bindings.stop()
            self._keep(self._end(old))

    def version(self, function: str) -> FunctionPool:
        """Return the pool for a function's or a pool's name. Raises Failure (404) if there is none."""
        pool = self.pools.get(self.names.get(function, function))
        if pool is None:
            sentence = f"this site has no function named {function[:64]!r}"
            raise Failure(sentence, code="not_found", status=404)
        return pool

    def _called(self, function: str, object: ObjectAddress | None) -> FunctionPool:
        """Return the version that answers a call by name: usually the live one.

        A version on trial that calls its own function gets the call if there is no live version, or if the live one lacks the object's class. Raises
        Failure (404) if there is no version.
        """
        caller = _caller.get()
        if caller is None or caller.manifest.name != function or caller not in self.pools.values():
            return self.version(function)
        live = self.pools.get(self.names.get(function, function))
        if live is None or (object is not None and object[0] in caller.classes - live.classes):
            return caller
        return live

    async def ask(
        self,
        function: str | FunctionPool,
        event: frames.FunctionEvent,
        body: AsyncIterator[bytes] | None = None,
        *,
        is_socket: bool = False,
    ) -> ExchangeResult:
        """Send an event to a function or one of its versions; return the result.

        An event for a Durable Object goes to the version that runs the object. Raises Failure (404) if there is no such function, Failure (503) if it
        is overloaded, Fault if it failed.
        """
        object = object_of(event)
        pool = self._called(function, object) if isinstance(function, str) else function
        if object is not None:
            versions = self._versions.get(pool.manifest.name, ())
            pool = next((version for version in versions if version.is_home_of(object)), pool)
        self._requested.set()
        with self._trace(pool.manifest.name, TRIGGERS[type(event)]):
            return await pool.ask(event, body, is_socket=is_socket)

    async def fetch(
        self,
        function: str | FunctionPool,
        event: frames.FetchEvent,
        body: AsyncIterator[bytes] | None = None,
        *,
        is_socket: bool = False,
    ) -> Response:
        """Send an HTTP request to a function. Raises as `ask` does.
        With `is_socket`, `body` carries a WebSocket's messages, and so does the stream of a response with status 101."""
        if body is not None:
            options = {**event.options, "websocket": self.limits.socket_message_bytes} if is_socket else event.options
            event = replace(event, streamed=True, options=options)
        result = await self.ask(function, event, body, is_socket=is_socket)
        try:
            response = _response_of(result)
            if response.status == 101 and not (is_socket and response.stream is not None):
                raise Failure(
                    "the function switched protocols although the request did not ask for it", code="wrong_type"
                )
        except Failure:
            if result.body is not None:
                await result.body.aclose()
            raise
        return response

    async def last_lines(self, pool: str) -> list[str]:
        """Return the last lines that a version printed.
        They include those of an exception that follows a response."""
        await asyncio.sleep(OUTPUT_S)
        return self.pools[pool].last_lines() if pool in self.pools else []

    async def static(self, pool: FunctionPool, event: frames.FetchEvent) -> Response | None:
        """Return the response of a version's asset; None if the function should answer."""
        bindings = pool.bindings
        found = None if bindings is None else await bindings.static(event.method, event.url, event.headers)
        if found is None:
            return None
        value, stream = (found.value, found.body) if isinstance(found, StreamingReply) else (found, None)
        return Response(value["status"], checked_headers(value["headers"]), value.get("body", b""), stream)

    async def _answer_subrequest(self, pool: FunctionPool, frame: frames.Request | Dial, body: Inbound | None) -> Any:
        """Answer a binding call, a fetch or a connection request of an isolate. Raises Failure."""
        if isinstance(frame, (frames.FetchEvent, Dial)) and not pool.manifest.has_egress:
            raise Failure("this function was loaded without access to the network", code="egress_denied", status=403)
        if isinstance(frame, Dial):
            return await self._egress.dial(frame)
        if isinstance(frame, frames.FetchEvent):
            return await self._egress.fetch(frame, body)
        if not isinstance(frame, frames.BindingCall):
            raise Failure("an isolate cannot send this kind of request", code="unsupported", status=400)
        if pool.bindings is None:
            raise Failure(f"the binding {frame.binding!r} is not served here", code="no_binding", status=501)
        token = _caller.set(pool)
        try:
            return await pool.bindings.answer(frame, body)
        finally:
            _caller.reset(token)

    def _start(self, pool: FunctionPool) -> None:
        """Start a version's queue consumers and cron triggers. Raises Failure."""
        if pool.bindings is not None:
            pool.bindings.start(partial(self.ask, pool))

    async def _watch(self) -> None:
        while True:
            is_busy = False
            for pool in tuple(self.pools.values()):
                is_busy = self._look(pool) or is_busy
            self._zygote_budget.trim(self.pools.values())
            is_busy = self._zygote_budget.fork_spares(self.pools.values()) or is_busy
            if not is_busy:
                self._requested.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._requested.wait()
            await asyncio.sleep(WATCH_S)

    def _look(self, pool: FunctionPool) -> bool:
        """Check one function; return whether it has work.
        An error is logged once and does not stop the checks of other functions."""
        try:
            is_busy = pool.isolates.watch()
            self._tell_cpu(pool)
        except Exception:
            if pool not in self._unwatched:
                log.exception("%s: its limits cannot be watched", pool.manifest.name)
            self._unwatched.add(pool)
            return True
        return is_busy

    def _tell_cpu(self, pool: FunctionPool) -> None:
        if spent_s := pool.isolates.spent_cpu_s():
            self._on_cpu(pool.manifest.name, spent_s)

    async def _end(self, pool: FunctionPool) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + pool.factory.limits.wall_s
        try:
            pool.isolates.close_sockets()
            while pool.is_at_work and loop.time() < ends_at:
                pool.isolates.watch()
                await asyncio.sleep(WATCH_S)
        finally:
            versions = self._versions[pool.manifest.name]
            versions.remove(pool)
            if not versions:
                del self._versions[pool.manifest.name]
            await pool.close()
            self._tell_cpu(pool)

    async def _close_all(self) -> None:
        ending = tuple(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        while self.pools:
            _, pool = self.pools.popitem()
            await pool.close()
            self._tell_cpu(pool)
        await asyncio.gather(*tuple(self._tasks), return_exceptions=True)

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _response_of(result: ExchangeResult) -> Response:
    """Check an isolate's response and convert it. Raises Failure."""
    value = result.value
    try:
        status, headers, body = value["status"], value["headers"], value.get("body", b"")
        pairs = checked_headers(headers)
        if not isinstance(status, int) or not (status == 101 or 200 <= status <= 599) or not isinstance(body, bytes):
            raise TypeError
    except (TypeError, KeyError, ValueError, AttributeError):
        raise Failure("the function's response is malformed", code="wrong_type") from None
    return Response(status, pairs, body, result.body)
