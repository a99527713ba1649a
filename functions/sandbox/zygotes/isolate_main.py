"""The main module of an isolate: imports a function's module and answers the runtime's events.

The first note of the runtime starts the import. Many requests run concurrently. The process is confined (tiers.py) and holds no credentials; it has
the SDK, the author's module and one channel. An exception of the author's code is sent to the runtime as a failure with its traceback.
"""

import asyncio
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import workers
from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import Channel, current_request
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.sandbox.zygotes.control_messages import Boot
from workers import bindings, entrypoint, host, trouble, workflows
from workers.durable.objects import Objects
from workers.entrypoint import Context, WorkerEntrypoint
from workers.events import MessageBatch, ScheduledController
from workers.face import Record, as_record
from workers.http.content_encoding import coded
from workers.http.request import Request, received
from workers.http.response import Response, pieces
from workers.remote.rpc_session import SESSION, RpcSession
from workers.sockets.joints import bridged

RESERVED = frozenset(
    {"fetch", "scheduled", "queue", "alarm", "env", "ctx", "tail", "test", "trace", "connect", "dup", "constructor"}
    | {"webSocketMessage", "webSocketClose", "webSocketError"}
)
UNKNOWN_OF_CF: dict[str, Any] = {  # documented fields of `request.cf` that are unknown here
    "asn": None, "asOrganization": None, "city": None, "continent": None, "country": None, "latitude": None, "longitude": None,
    "metroCode": None, "postalCode": None, "region": None, "regionCode": None, "timezone": None, "tlsCipher": None, "tlsVersion": None,
}  # fmt: skip
REMEDIES = (  # for errors of a module's import
    (PermissionError, "; functions run as another user: run chmod -R go+rX on the function's folder"),
    (ModuleNotFoundError, "; packages are named in dependencies of pyproject.toml, or in requirements.txt"),
)
ANSWER_IN_ONE = 64 << 10  # larger bodies are sent in chunks, so that they do not delay other responses


def run(channel_fd: int, trace_fd: int, boot: Boot) -> None:
    """Serve the function until the runtime closes the channel."""
    # A signal handler in C, so it works while the event loop is blocked.
    faulthandler.register(signal.SIGUSR1, file=trace_fd, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:0] = boot.sys_path
    trouble.show_authors_lines()
    sock = socket.socket(fileno=channel_fd)
    asyncio.run(serve(sock, boot))


async def serve(sock: socket.socket, boot: Boot) -> None:
    function, is_wanted = Function(boot), asyncio.Event()
    channel = await Channel.open(
        sock, function.answer, is_runtime=False, describe=trouble.describe, on_note=lambda note: is_wanted.set()
    )
    closed = asyncio.ensure_future(channel.closed.wait())
    closed.add_done_callback(lambda _: is_wanted.set())
    await is_wanted.wait()  # the note comes first, so this task continues before the first request's task runs
    if closed.done():
        return
    function.load()
    gc.freeze()  # exempts the module's objects from garbage collection, which would pause a response for 10 ms
    host.connect(channel)
    entrypoint.on_background = lambda count: channel.note("background", count)
    entrypoint.on_object_background = lambda object, count: channel.note("object_background", [*object, count])
    channel.note(
        "ready" if function.broken is None else "broken", None if function.broken is None else function.broken.detail
    )
    await closed


class Function:
    """The author's module, and its handlers."""

    def __init__(self, boot: Boot) -> None:
        """Compile the module; `load` imports it."""
        self.broken: Failure | None = None
        self._boot = boot
        self._loader = EarlyLoader(boot.main)
        self._module = ModuleType("nothing")
        self._objects = Objects()

    def load(self) -> None:
        """Import the module. If that fails, all later requests fail with the same error."""
        main = self._boot.main
        try:
            for kind, name, options in self._boot.bindings:
                setattr(workers.env, name, bindings.open_face(host.LateChannel(), kind, name, options))
            self._module = self._loader.imported()
        except (Exception, SystemExit) as error:
            what = "called exit while it was imported" if isinstance(error, SystemExit) else "cannot be imported"
            name, detail = type(error).__name__, trouble.text_of(error)
            remedy = next((each for kind, each in REMEDIES if isinstance(error, kind)), "")
            sentence = f"{os.path.basename(main)} {what}: {name}: {error}{remedy}"
            self.broken = Failure(sentence, code="import_failed", name=name, detail=f"{detail.rstrip()}{remedy}\n")

    async def answer(self, frame: frames.Request, body: Inbound | None) -> Any:
        if self.broken is not None:
            raise self.broken
        current_request.set(frame.id)
        try:
            if isinstance(frame, frames.FetchEvent):
                return await self._fetch(frame, body)
            if isinstance(frame, frames.RpcEvent):
                return await self._rpc(frame, body)
            if isinstance(frame, frames.ScheduledEvent):
                return await self._scheduled(frame)
            if isinstance(frame, frames.QueueEvent):
                return await self._queue(frame)
            if isinstance(frame, frames.TailEvent):
                return await self._event("tail", as_record(frame.events))
        except SystemExit as error:
            raise _exited(error) from None
        raise Failure(f"functions do not handle {type(frame).__name__}", code="unsupported")

    async def _fetch(self, frame: frames.FetchEvent, body: Inbound | None) -> StreamingReply:
        is_socket = body is not None and isinstance(frame.options.get("websocket"), int)
        if is_socket:
            host.max_message_bytes = frame.options["websocket"]
        request = received(frame.method, frame.url, frame.headers, frame.body, None if is_socket else body)
        request.cf = Record({**UNKNOWN_OF_CF, **frame.options.get("cf", {})})
        if "object" in frame.options:
            response = await self._in_object(
                frame.options, lambda target: _fetched_by(target, request, workers.env, getattr(target, "ctx", None))
            )
        else:
            response = await self._respond(frame, request)
        if not isinstance(response, Response):
            kind = type(response).__name__
            sentence = f"fetch returned a value of type {kind}; it must return a Response"
            raise Failure(sentence, code="wrong_type", name="TypeError")
        if response.status == 101 or response.web_socket is not None:
            return _switched(response, body if is_socket else None)
        return _answer_of(response, frame.method)

    async def _respond(self, frame: frames.FetchEvent, request: Request) -> Any:
        context = Context(frame.options.get("props"))
        kind = self._entrypoint(frame.entrypoint)
        if kind is not None:
            return await _fetched_by(_made(kind, context), request, workers.env, context)
        on_fetch = getattr(self._module, "on_fetch", None) or getattr(self._module, "fetch_handler", None)
        if frame.entrypoint != "default" or on_fetch is None:
            raise Failure(self._no_entrypoint(frame.entrypoint), code="no_handler", name="TypeError")
        return await _awaited(_with_wanted(on_fetch, request, workers.env, context))

    async def _rpc(self, frame: frames.RpcEvent, body: Inbound | None) -> Any:
        """Call a method.
        If its arguments or result contain functions or streams, an RPC session follows the call."""
        session = RpcSession()
        args, kwargs = session.unpack(frame.args), session.unpack(frame.kwargs)
        is_started = session.is_used

        async def work() -> Any:
            try:
                return await self._called(frame, session, args.value, kwargs.value, is_started)
            finally:
                args.release()
                kwargs.release()

        if is_started and body is not None:
            return StreamingReply({SESSION: True}, session.serve(work, body))
        value = await work()
        if session.is_used and body is not None:
            return StreamingReply({SESSION: True}, session.serve(partial(_at_once, value), body))
        return value

    async def _called(
        self, frame: frames.RpcEvent, session: RpcSession, args: list[Any], kwargs: dict[str, Any], is_started: bool
    ) -> Any:
        """Return the method's encoded result; without a session a Response or a stream is returned directly."""

        async def act(target: Any) -> Any:
            is_internal = frame.options.get("internal") is True
            value = await _called(target, frame.method, args, kwargs, is_internal)
            if isinstance(value, Response) and value.web_socket is None and not is_started:
                told = _answer_of(value, "GET")
                return StreamingReply({frames.RESPONSE: told.value}, told.body)
            is_stream = hasattr(value, "__aiter__") and not is_started
            return value if is_stream else session.pack(value, "what it returned")

        if "object" in frame.options:
            return await self._in_object(frame.options, act)
        kind = self._entrypoint(frame.entrypoint)
        if kind is None:
            raise Failure(self._no_entrypoint(frame.entrypoint), code="no_handler", name="TypeError")
        return await act(_made(kind, Context(frame.options.get("props"))))

    async def _scheduled(self, frame: frames.ScheduledEvent) -> None:
        controller = ScheduledController(frame.cron, frame.scheduled_time_ms)
        await self._event("scheduled", controller)

    async def _queue(self, frame: frames.QueueEvent) -> dict[str, Any]:
        batch = MessageBatch(frame.queue, frame.messages)
        try:
            await self._event("queue", batch)
        except (Exception, SystemExit) as error:
            failure = _exited(error) if isinstance(error, SystemExit) else trouble.describe(error)
            raise failure.giving(batch.outcome(has_failed=True)) from None
        return batch.outcome()

    async def _event(self, name: str, event: Any) -> None:
        context, kind = Context(), self._entrypoint("default")
        if kind is not None and (handler := getattr(kind, name, None) or getattr(kind, f"on_{name}", None)) is not None:
            handler = getattr(_made(kind, context), handler.__name__)
            await _awaited(_with_wanted(handler, event, workers.env, context))
        elif (plain := getattr(self._module, f"on_{name}", None)) is not None:
            await _awaited(_with_wanted(plain, event, workers.env, context))
        else:
            raise Failure(f"the function has no {name} handler", code="no_handler", name="TypeError")

    def _entrypoint(self, name: str) -> type[Any] | None:
        """Return an entrypoint class of the module, None if there is none. `Default` needs no base class."""
        kind = getattr(self._module, "Default" if name == "default" else name, None)
        is_one = isinstance(kind, type) and (name == "default" or issubclass(kind, WorkerEntrypoint))
        return kind if is_one else None

    def _no_entrypoint(self, name: str) -> str:
        found = [key for key, value in vars(self._module).items() if _is_entrypoint(value)]
        there_is = ", ".join(found) or "none"
        if name == "default":
            main = os.path.basename(self._module.__file__ or "")
            sentence = f'Python entrypoint "{main}" does not export a handler named "on_fetch"'  # as on the platform
            return f"{sentence}, nor a `class Default(WorkerEntrypoint)`; its entrypoints: {there_is}"
        return f"the module has no entrypoint {name!r}; its entrypoints: {there_is}"

    async def _in_object(self, options: dict[str, Any], act: Callable[[Any], Awaitable[Any]]) -> Any:
        name = str(options["object"])
        is_workflow = name.startswith(workflows.PREFIX)
        kind = workflows.object_class(self._module, name) if is_workflow else getattr(self._module, name, None)
        return await self._objects.run(kind, options, act)


class EarlyLoader(SourceFileLoader):
    """A loader that compiles a module before its import; again if the file has changed since."""

    def __init__(self, path: str) -> None:
        name = os.path.splitext(os.path.basename(path))[0]
        if name in sys.modules:
            name = f"{name}_function"  # a module such as queue.py must not hide the standard library's
        super().__init__(name, path)
        self._compiled: tuple[Mapping[str, Any], CodeType | None] | None = None
        with suppress(Exception):  # the import raises it again
            self._compiled = self.path_stats(path), super().get_code(name)

    def get_code(self, fullname: str) -> CodeType | None:
        stats, code = self._compiled or (None, None)
        return code if stats == self.path_stats(self.path) else super().get_code(fullname)

    def imported(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.name, self.path, loader=self)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module
        self.exec_module(module)
        return module


def _exited(error: SystemExit) -> Failure:
    return Failure(f"the function called exit({error.code!r})", code="exit", detail=trouble.text_of(error))


def _is_entrypoint(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, WorkerEntrypoint) and value is not WorkerEntrypoint


async def _called(target: Any, name: str, args: list[Any], kwargs: dict[str, Any], is_internal: bool) -> Any:
    """Call a public method as another function does.
    `is_internal` marks a call by the runtime, which may use reserved names."""
    method = None if name.startswith("_") else getattr(target, name, None)
    if not callable(method) or (name in RESERVED and not is_internal):
        sentence = f"{type(target).__name__} has no method {name!r} that can be called"
        raise Failure(sentence, code="no_method", name="TypeError")
    if is_internal:
        return await _awaited(_with_wanted(method, *as_record(args)))
    return await _awaited(method(*args, **kwargs))


def _made(kind: type[Any], context: Context) -> Any:
    """Instantiate an entrypoint, whose class may have any constructor."""
    if issubclass(kind, WorkerEntrypoint):
        return kind(context, workers.env)
    made = kind() if kind.__init__ is object.__init__ else _with_wanted(kind, context, workers.env)
    made.ctx, made.env = context, workers.env
    return made


async def _fetched_by(target: Any, *arguments: Any) -> Any:
    """Call `fetch` with as many arguments as it takes, as the platform does."""
    fetch = getattr(target, "fetch", None) or getattr(target, "on_fetch", None)
    if fetch is None:
        raise Failure(f"{type(target).__name__} has no fetch method", code="no_handler", name="TypeError")
    return await _awaited(_with_wanted(fetch, *arguments))


async def _at_once(value: Any) -> Any:
    return value


async def _awaited(value: Any) -> Any:
    """Await until the value is not awaitable: a handler may return the awaitable of `fetch`."""
    while inspect.isawaitable(value):
        value = await value
    return value


def _with_wanted(function: Any, *arguments: Any) -> Any:
    """Call a handler with as many of the positional arguments as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return function(*arguments)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*arguments[: len(positional)])


def _answer_of(response: Response, method: str) -> StreamingReply:
    whole, stream, headers = coded(response)
    value = {"status": response.status, "headers": headers}
    if stream is not None and method != "HEAD":
        return StreamingReply(value, stream)
    if stream is not None:
        Context().wait_until(stream.aclose())  # the client gets no body
    if whole and len(whole) > ANSWER_IN_ONE:
        return StreamingReply(value, pieces(whole))
    return StreamingReply({**value, "body": whole or b""})


def _switched(response: Response, body: Inbound | None) -> StreamingReply:
    """Switch protocols: from now on the exchange's two streams carry a WebSocket's messages."""
    if response.web_socket is None:
        sentence = "a response with the status 101 needs the end of a WebSocketPair: Response(None, status=101, web_socket=client)"
        raise Failure(sentence, code="wrong_type", name="TypeError")
    if body is None:
        sentence = "the request did not ask for a WebSocket (upgrade: websocket); answer it with the status 426"
        raise Failure(sentence, code="no_upgrade", name="TypeError")
    value = {"status": 101, "headers": response.headers.multi_items(), "web_socket": True}
    return StreamingReply(value, bridged(response.web_socket, body))
