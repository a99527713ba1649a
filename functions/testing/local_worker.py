"""Serves a folder's function for a test, with the same isolates and bindings as at a site.

Its state is private to the test. It runs in a thread with an event loop, so a test may be a plain function. `fetch` sends a request over HTTP; `env`
has the bindings with the methods that the function itself calls; `run` awaits those calls. Queues, alarms and crons use a clock that the test moves.
"""

import asyncio
import json as json_module
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import msgspec

from pilotlight.functions.bindings.binding import BindingError, Clock
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, BindingCall, QueueEvent, ScheduledEvent, TailEvent
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.dependencies.layers import requirements_of
from pilotlight.functions.host.pool import FunctionPool
from pilotlight.functions.manifest import BindingDeclaration, Manifest, load_manifest
from pilotlight.functions.routes.invocations import FunctionRoute
from pilotlight.functions.served import ServedFunctions
from pilotlight.functions.testing.answered_models import Answer, AnsweredModels
from pilotlight.sites.site import FunctionConfig, FunctionsConfig
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.function_logs import LoggedInvocation, LogQuery
from pilotlight.wire.http.asgi import send_json
from pilotlight.wire.http.listen import bind, url_of
from pilotlight.wire.http.server import Server

SDK = Path(__file__).parents[1] / "sdk"
START_S = 330.0  # limit for the start of a function, of which installing packages may take 300 s
WAIT_S = 60.0  # limit for everything that a test waits for
LOOK_S = 0.02
T = TypeVar("T")


class FunctionFailed(Exception):
    """The function failed; the message has its traceback."""


@dataclass(frozen=True)
class WorkerResponse:
    status: int
    headers: Mapping[str, str]  # the first value if a name occurs several times
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return json_module.loads(self.content)


@dataclass(frozen=True)
class QueueOutcome:
    """The decisions of a `queue` handler, by the messages' positions in the batch."""

    acked: list[int]
    retried: dict[int, float | None]  # delay in seconds by message; None for the consumer's default
    error: str = ""  # traceback of the exception that the handler raised


class TestClock(Clock):
    """The machine's clock plus the seconds by which the test has advanced it.
    For crons, only those seconds pass."""

    __test__ = False  # otherwise pytest would collect it because of its name
    look_s = LOOK_S

    def __init__(self) -> None:
        self.added_s = 0.0
        self._began_s = time.time()

    def now_s(self) -> float:
        return time.time() + self.added_s

    def schedule_s(self) -> float:
        return self._began_s + self.added_s  # a minute that begins during a test fires no cron


class LocalWorker:
    """A function that is served for a test: use as `with`, or by the fixtures `worker` and `make_worker`."""

    def __init__(
        self,
        directory: Path,
        state: Path | None = None,
        *,
        environment: str | None = None,
        vars: Mapping[str, Any] | None = None,
        ai: Answer | None = None,
        services: Iterable[Path] = (),
        layers: Path | None = None,
    ) -> None:
        """Load the manifest of the function in `directory`; `__enter__` serves the function.

        `state` is the folder for the bindings' data; by default a temporary one. `layers` is a folder of installed packages that workers share;
        without it each installs its own.
        """
        self._manifest = _for_tests(load_manifest(directory, environment), vars or {})
        self._others = [_for_tests(load_manifest(each), {}) for each in services]
        self._state, self._layers = state, layers
        self._models = AnsweredModels(ai)
        self._clock = TestClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stack = AsyncExitStack()
        self._served: ServedFunctions | None = None
        self._http: aiohttp.ClientSession | None = None
        self.url = ""
        self.env: Any = SimpleNamespace()

    def __enter__(self) -> "LocalWorker":
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name=f"worker {self._manifest.name}", daemon=True)
        self._thread.start()
        try:
            self._run(self._start(), START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def run(self, work: Awaitable[T]) -> T:
        """Await a call of `env`, and return its result or raise its exception.
        An example is `worker.run(worker.env.KV.get("key"))`."""
        return self._run(work, WAIT_S)

    def _run(self, work: Awaitable[T], limit_s: float) -> T:
        assert self._loop is not None, "the worker is open"

        async def awaited() -> T:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await work
            except TimeoutError:
                if limit.expired():
                    raise TimeoutError(f"{self._manifest.name} took more than {limit_s:g} s") from None
                raise

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    # -- what a test asks of the function ----------------------------------------------------------------------------------------------

    def fetch(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | str | None = None,
        json: Any = None,
    ) -> WorkerResponse:
        """Send a request.
        Redirects are not followed. If the function fails, the response has status 500 and its traceback."""
        return self.run(self._fetched(path, method, dict(headers or {}), body, json))

    def scheduled(self, cron: str = "* * * * *", at_s: float | None = None) -> None:
        """Call the `scheduled` handler as if at a Unix time in seconds. Raises FunctionFailed."""
        at_ms = round(1000 * (self._clock.now_s() if at_s is None else at_s))
        self.run(self._asked(ScheduledEvent(UNNUMBERED, cron, at_ms)))

    def queue(self, name: str, bodies: Iterable[Any], *, attempts: int = 1) -> QueueOutcome:
        """Call the `queue` handler with `bodies` as a batch of the queue `name`.
        Its exception is the outcome's `error`. Raises FunctionFailed if there is no outcome, such as without a handler."""
        from workers.values import pack

        now_ms = round(1000 * self._clock.now_s())
        messages = [
            {"id": uuid.uuid4().hex, "timestamp_ms": now_ms, "body": pack(body, "a message"), "attempts": attempts}
            for body in bodies
        ]
        ids = [message["id"] for message in messages]
        outcome, error = self.run(self._delivered(QueueEvent(UNNUMBERED, name, messages)))
        retried = {ids.index(each["id"]): each.get("delay_s") for each in outcome["retried"]}
        return QueueOutcome([ids.index(id) for id in outcome["acked"]], retried, error)

    def tail(self, events: list[dict[str, Any]]) -> None:
        """Call the `tail` handler. Raises FunctionFailed."""
        self.run(self._asked(TailEvent(UNNUMBERED, events)))

    def advance(self, seconds: float) -> None:
        """Advance the clock; alarms, crons, delayed messages and expirations up to the new time become due."""
        self._clock.added_s += seconds

    def until_idle(self) -> None:
        """Wait until the queues are empty and the function has no open work.
        Open work is requests, batches, due alarms and `wait_until`."""
        self.run(self._idle())

    @property
    def logs(self) -> list[str]:
        """The lines that the function printed, oldest first."""
        return [line.text for each in self.invocations for line in each.lines]

    @property
    def invocations(self) -> list[LoggedInvocation]:
        """The function's invocations with their outcomes, oldest first."""
        found = self.run(self._functions.invocations.find(LogQuery(self._manifest.name, limit=1000)))
        return sorted(found, key=lambda each: each.seq)

    # -- inside the thread -------------------------------------------------------------------------------------------------------------

    @property
    def _functions(self) -> Any:
        assert self._served is not None, "the worker is open"
        return self._served.functions

    @property
    def _pool(self) -> FunctionPool:
        pool: FunctionPool = self._functions.pools[self._manifest.name]
        return pool

    async def _start(self) -> None:
        config = FunctionsConfig(
            serve=tuple(
                FunctionConfig(name=each.name, path=str(each.directory)) for each in (self._manifest, *self._others)
            ),
            show_errors=True,
            egress_allow=("localhost", "127.0.0.1"),
        )
        folder = self._state
        if folder is None:
            folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="pilotlight-worker-")))
        if self._layers is not None and any(
            requirements_of(each.directory) for each in (self._manifest, *self._others)
        ):
            _link_layers(folder / "layers", self._layers)
        self._served = ServedFunctions(config, folder, self._models, lambda: [], "test", clock=self._clock)
        self._served.manifests.update({each.name: (each, ()) for each in (self._manifest, *self._others)})
        await self._stack.enter_async_context(self._served)
        for each in (self._manifest, *self._others):
            await self._served.migrate(each.name)
            await self._functions.pools[each.name].prepare()  # installing packages may take minutes
        self.env = SimpleNamespace(**await self._faces())
        route = FunctionRoute(
            self._functions, self._served.version_of, _Open(), show_errors=True, name=self._manifest.name
        )
        server, listener = Server(_Refusing(route)), bind("127.0.0.1", 0)
        self.url = url_of(listener)
        await server.start(listener)
        self._stack.push_async_callback(server.stop)
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(self.url))

    async def _faces(self) -> dict[str, Any]:
        """Return the bindings with the methods that functions call, over a separate channel."""
        put_sdk_on_path()
        from workers.bindings import open_face

        ours, theirs = socket.socketpair()
        self._stack.callback((await Channel.open(ours, self._answer, is_runtime=True)).close)
        channel = await Channel.open(theirs, _refuse, is_runtime=False)
        self._stack.callback(channel.close)
        return {
            each.name: open_face(channel, each.kind, each.name, dict(each.options))
            for each in self._pool.manifest.bindings
        }

    async def _answer(self, frame: Any, body: Inbound | None) -> Any:
        assert isinstance(frame, BindingCall)
        assert self._pool.bindings is not None
        return await self._pool.bindings.answer(frame, body)

    async def _fetched(
        self, path: str, method: str, headers: dict[str, str], body: bytes | str | None, json: Any
    ) -> WorkerResponse:
        assert self._http is not None
        asked = {"json": json} if json is not None else {"data": body}
        async with self._http.request(method, path, headers=headers, allow_redirects=False, **asked) as answer:
            return WorkerResponse(answer.status, answer.headers.copy(), await answer.read())

    async def _asked(self, event: Any) -> Any:
        try:
            return await self._functions.ask(self._manifest.name, event)
        except Failure as failure:
            raise FunctionFailed(failure.detail or failure.message) from None

    async def _delivered(self, event: QueueEvent) -> tuple[Any, str]:
        """Return the decisions of a `queue` handler, and its traceback if it failed. Raises FunctionFailed."""
        try:
            return (await self._functions.ask(self._manifest.name, event)).value, ""
        except Failure as failure:
            error = failure.detail or failure.message
            if failure.value is None or failure.code == "no_handler":
                raise FunctionFailed(error) from None
            return failure.value, error

    async def _idle(self) -> None:
        assert self._served is not None
        names = {str(each.options["queue"]) for each in self._manifest.bindings if each.kind == "queue_producer"}
        names |= {each.queue for each in self._manifest.consumers}
        consumed = {consumer.queue for each in (self._manifest, *self._others) for consumer in each.consumers}
        quiet = 0
        while quiet < 5:  # several checks, because finished work may have started more
            depths = [await self._served.queue(name).depth() for name in names & consumed]
            quiet = 0 if any(depths) or self._pool.is_at_work else quiet + 1
            await asyncio.sleep(LOOK_S)


def _for_tests(manifest: Manifest, vars: Mapping[str, Any]) -> Manifest:
    """Return a manifest whose queues deliver at once, with the test's vars."""
    kept = tuple(each for each in manifest.bindings if each.name not in vars)
    given = tuple(BindingDeclaration("var", name, {"value": value}) for name, value in vars.items())
    consumers = tuple(_at_once(consumer) for consumer in manifest.consumers)
    return replace(manifest, bindings=kept + given, consumers=consumers)


def _link_layers(link: Path, layers: Path) -> None:
    """Link to a folder of shared packages, unless it cannot be written or the link exists."""
    with suppress(OSError):
        layers.mkdir(parents=True, exist_ok=True)
    if os.access(layers, os.W_OK) and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(layers.resolve(), target_is_directory=True)


def _at_once(consumer: Any) -> Any:
    return msgspec.structs.replace(consumer, max_batch_timeout=0)


def put_sdk_on_path() -> None:
    """Put the SDK at the end of the import path: the project may have its own package `workers`."""
    if str(SDK) not in sys.path:
        sys.path.append(str(SDK))


class _Open:
    """An admission gate that admits everything."""

    @contextmanager
    def permit(self) -> Iterator[None]:
        yield

    attachment = permit

    async def until_draining(self) -> None:
        await asyncio.Event().wait()


class _Refusing:
    """An ASGI application that turns refusals into error responses."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await send_json(send, json_module.dumps(error.body(Dialect.OPENAI)).encode(), error.status(Dialect.OPENAI))


async def _refuse(frame: Any, body: Any) -> Any:
    raise BindingError("the test offers no bindings to functions")
