"""EngineClient: the front end's interface to an engine host.

socket_client.py implements it for a host in another process. This module matches outputs to submitted sequences, and aborts a sequence when its
reader leaves. It is independent of HTTP, text and torch.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from pilotlight.engine.api.protocol import (
    Abort,
    Command,
    ErrorCode,
    Event,
    FrontEndRefused,
    Hello,
    HostEnding,
    HostReady,
    LoadModel,
    LoadProgress,
    ModelFailed,
    ModelInfo,
    ModelLoad,
    ModelReady,
    ModelSpec,
    ModelUnloaded,
    PrewarmModel,
    StepOutput,
    Submit,
    TokenOutput,
    UnloadModel,
)

ProgressCallback = Callable[[LoadProgress], None]
T = TypeVar("T")


class EngineError(Exception):
    """The engine refused or lost a request.

    `code` is an error code of the protocol; `str()` is a sentence for the user.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


_PREWARMS_FROM = (3, 5)  # the protocol version that introduced PrewarmModel


class _OutputQueue:
    """The outputs of one sequence, as they arrive."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()  # holds at most max_tokens outputs
        self.is_finished = False  # whether the host has sent the sequence's last output
        self._is_read = False

    def put(self, output: TokenOutput) -> None:
        self.is_finished = self.is_finished or output.finish_reason is not None
        self._outputs.put_nowait(output)

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self

    async def __anext__(self) -> TokenOutput:
        if self._is_read:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._is_read = output.finish_reason is not None
        if output.finish_reason == "error":
            raise EngineError(output.error_code or "engine_error", output.error_message or "the engine failed")
        return output


class EngineClient(ABC):
    """A client of one engine host, which makes calls and handles the answering events in one event loop.

    When the host dies, every open call raises EngineError("engine_error"), and later calls raise it at once.
    """

    def __init__(self, greeting: Hello) -> None:
        self._host_version = (0, 0)  # the host's protocol version; (0, 0) until the host has announced it
        self._greeting = greeting  # the first command to the host
        self._has_started = False
        self._streams: dict[str, _OutputQueue] = {}
        self._greetings: _PendingCalls[HostReady] = _PendingCalls()
        self._loads: _PendingCalls[ModelInfo] = _PendingCalls()
        self._load_specs: dict[str, ModelSpec] = {}  # the spec of each pending load, by the model's name
        self._unloads: _PendingCalls[None] = _PendingCalls()
        self._progress: dict[str, ProgressCallback] = {}
        self._step_callbacks: list[Callable[[StepOutput], None]] = []
        self.loads: dict[str, ModelLoad] = {}  # the newest load of every model, by name
        self.last_event_at = time.monotonic()  # time of the newest frame from the host, by which its liveness is judged
        self.death: str | None = None  # why the host is dead; None while it is not known to be dead
        self.failed_under: tuple[str, ...] = ()  # sequences of the step whose failure ended the host, as it reported

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Call `callback` for each later StepOutput; used for metrics."""
        self._step_callbacks.append(callback)

    async def hello(self) -> HostReady:
        """Greet the host, and wait until it is able to load a model. Raises EngineError."""
        self._start()
        return await self._greetings.answer("host", lambda: self.send(self._greeting))

    async def load_model(self, spec: ModelSpec, on_progress: ProgressCallback | None = None) -> ModelInfo:
        self._start()
        if spec.name in self._loads and not (other := self._load_specs[spec.name]).loads_same(spec):
            raise EngineError("model_load_failed", f"{spec.name} is being loaded from {other.path}; unload it first")
        self._load_specs[spec.name] = spec
        if on_progress:
            self._progress[spec.name] = on_progress
        try:
            return await self._loads.answer(spec.name, lambda: self.send(LoadModel(spec)))
        finally:
            self._progress.pop(spec.name, None)

    def prewarm_model(self, spec: ModelSpec) -> None:
        """Ask a ready host to prepare for a model; do nothing if its protocol is older than 3.5."""
        if self.death is None and self._host_version >= _PREWARMS_FROM:
            self.send(PrewarmModel(spec))

    async def unload_model(self, name: str) -> None:
        self._start()
        await self._unloads.answer(name, lambda: self.send(UnloadModel(name)))

    @asynccontextmanager
    async def generate(self, submit: Submit) -> AsyncGenerator[AsyncIterator[TokenOutput], None]:
        """Open a scope for one sequence; iterating yields its outputs.

        Outputs come in order, and the last one has a finish reason. The finish reason "error" raises EngineError instead. Leaving the scope early,
        for any reason, aborts the sequence.
        """
        self._start()
        if submit.sequence_id in self._streams:
            raise EngineError("invalid_request", f"sequence id {submit.sequence_id!r} is already in use")
        stream = self._streams[submit.sequence_id] = _OutputQueue()
        try:
            self.send(submit)
            yield stream
        finally:
            del self._streams[submit.sequence_id]
            if not stream.is_finished:
                self.send(Abort(submit.sequence_id))

    def fail(self, message: str) -> None:
        """Mark the host as dead: end every open call with EngineError("engine_error")."""
        if self.death is not None:
            return
        self.death = message
        self.loads = {}
        for sequence_id, stream in self._streams.items():
            if not stream.is_finished:
                error = TokenOutput(
                    sequence_id, finish_reason="error", error_code="engine_error", error_message=message
                )
                stream.put(error)
        for calls in (self._greetings, self._loads, self._unloads):
            calls.reject_all(EngineError("engine_error", message))

    @abstractmethod
    async def close(self) -> None:
        """End the host, which no other front end uses, and fail every open call with EngineError."""

    def _start(self) -> None:
        """Greet the host and start to receive in the running event loop, at the first call.

        Raises EngineError if the host is dead.
        """
        if self.death is not None:
            raise EngineError("engine_error", self.death)
        if not self._has_started:
            self._connect()
            self._has_started = True
            self.send(self._greeting)

    @abstractmethod
    def _connect(self) -> None:
        """Start to receive events, each of which is passed to `_handle`."""

    @abstractmethod
    def send(self, command: Command) -> None: ...

    def _handle(self, event: Event) -> None:
        self.last_event_at = time.monotonic()
        match event:
            case StepOutput():
                self.loads = event.loads
                for output in event.outputs:
                    stream = self._streams.get(output.sequence_id)
                    if stream is not None:  # otherwise the reader has left, and an Abort was sent
                        stream.put(output)
                for callback in self._step_callbacks:
                    callback(event)
            case HostEnding(reason, failed_under):
                self.failed_under = failed_under
                self.fail(reason)
            case FrontEndRefused(reason):
                self.fail(reason)
            case HostReady(version):
                self._host_version = version
                self._greetings.resolve("host", event)
            case LoadProgress(name):
                if name in self._progress:
                    self._progress[name](event)
            case ModelReady(info):
                self._loads.resolve(info.name, info)
            case ModelFailed(name, code, message):
                self._loads.reject(name, EngineError(code, message))
            case ModelUnloaded(name):
                self._unloads.resolve(name, None)
                message = f"model {name!r} was unloaded while it loaded"
                self._loads.reject(name, EngineError("model_not_found", message))


class _PendingCalls(Generic[T]):
    """Pending calls of one kind in one event loop, by the name of the model or host that a call concerns."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    async def answer(self, name: str, ask: Callable[[], None]) -> T:
        """Send a request by `ask`, and wait for its answer.

        A second call with the same name sends nothing and shares the answer.
        """
        future = self._futures.get(name)
        if future is None:
            future = self._futures[name] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: self._settled(name, done))
            ask()
        return await asyncio.shield(future)

    def resolve(self, name: str, answer: T) -> None:
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.set_result(answer)

    def reject(self, name: str, error: Exception) -> None:
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.set_exception(error)

    def reject_all(self, error: Exception) -> None:
        for name in list(self._futures):
            self.reject(name, error)

    def _settled(self, name: str, future: asyncio.Future[T]) -> None:
        self._futures.pop(name, None)
        if not future.cancelled():
            # Mark the exception as retrieved, because the caller may have left, for instance when a site stops.
            future.exception()
