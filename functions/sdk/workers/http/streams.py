"""ReadableStream, WritableStream and TransformStream with the platform's methods.

Each is an async iterator, or feeds one through a queue.
"""

import asyncio
import inspect
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from workers.face import Buffer, Named, Record, as_record
from workers.http.tee import Tee

MAX_AHEAD = 16  # chunks that a writer may be ahead of the reader


class StreamReader(Named):
    """The result of `getReader`; reads from any async iterator."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks
        self._iterator = aiter(chunks)

    async def read(self) -> Record:
        """Return {done, value}, as the platform does."""
        try:
            return Record(done=False, value=await anext(self._iterator))
        except StopAsyncIteration:
            return Record(done=True, value=None)

    async def cancel(self, reason: Any = None) -> None:
        if (aclose := getattr(self._chunks, "aclose", None)) is not None:
            await aclose()

    def release_lock(self) -> None:
        """Do nothing: the next reader continues where this one stopped."""


class Readable(Named):
    """The platform's methods for all streams that are async iterators of chunks."""

    locked = False

    def get_reader(self, options: Any = None) -> StreamReader:
        return StreamReader(self)

    def pipe_through(self, transform: Any, options: Any = None) -> Any:
        """Feed this stream into a TransformStream; return the output."""
        task = asyncio.ensure_future(self.pipe_to(transform.writable))
        _piping.add(task)
        task.add_done_callback(_piped)
        return transform.readable

    async def pipe_to(self, destination: Any, options: Any = None) -> None:
        writer = destination.get_writer()
        try:
            async for chunk in self:  # type: ignore[attr-defined]
                await writer.write(chunk)
        except Exception as error:
            await writer.abort(error)
            raise
        await writer.close()

    def tee(self) -> list[Any]:
        from workers.http.body import ByteStream  # imported late, because body.py imports this module

        return [ByteStream(branch) for branch in Tee(ByteStream(aiter(self))).branches]


class ByteStream(Readable):
    """A ReadableStream of bytes that is read once, by chunks or as a whole.
    `chunks` is an async iterator."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._is_used = False

    @property
    def body_used(self) -> bool:
        return self._is_used

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_used:
            raise TypeError("this body has been read already; keep the result of the first read")
        self._is_used = True
        return self._chunks

    async def bytes(self) -> Buffer:
        return Buffer(b"".join([chunk async for chunk in self]))

    async def array_buffer(self) -> Buffer:
        return await self.bytes()

    async def text(self) -> str:
        return (await self.bytes()).decode(errors="replace")

    async def json(self) -> Any:
        return as_record(json.loads(await self.bytes()))

    async def cancel(self, reason: object = None) -> None:
        """Make the sender stop."""
        self._is_used = True
        await self.aclose()

    async def aclose(self) -> None:
        if (aclose := getattr(self._chunks, "aclose", None)) is not None:
            await aclose()


_piping: set["asyncio.Future[Any]"] = set()


def _piped(task: "asyncio.Future[Any]") -> None:
    _piping.discard(task)
    if not task.cancelled():
        task.exception()  # the reader gets this error


class StreamController(Named):
    """The controller that is passed to a stream source's methods."""

    def __init__(self) -> None:
        self._chunks: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._has_closed = False
        self._error: BaseException | None = None

    @property
    def desired_size(self) -> int:
        return MAX_AHEAD - len(self._chunks)

    def enqueue(self, chunk: Any) -> None:
        if self._has_closed or self._error is not None:
            raise TypeError("the stream is closed already")
        self._chunks.append(chunk)
        self._changed.set()

    def close(self) -> None:
        self._has_closed = True
        self._changed.set()

    terminate = close

    def error(self, reason: Any = None) -> None:
        self._error = reason if isinstance(reason, BaseException) else RuntimeError(str(reason))
        self._changed.set()

    async def _room(self) -> None:
        while len(self._chunks) >= MAX_AHEAD and not self._has_closed and self._error is None:
            self._changed.clear()
            await self._changed.wait()


class ReadableStream(Readable):
    """A stream of chunks from `source`: a dict or object with `start`, `pull` and `cancel`, all optional."""

    def __init__(self, source: Any = None, strategy: Any = None) -> None:
        self._source = source
        self._controller = StreamController()
        self._has_started = False

    @classmethod
    def new(cls, source: Any = None, strategy: Any = None) -> "ReadableStream":
        return cls(source, strategy)

    def __aiter__(self) -> "ReadableStream":
        return self

    async def __anext__(self) -> Any:
        controller = self._controller
        if not self._has_started:
            self._has_started = True
            await _called(self._source, "start", controller)
        while not controller._chunks:
            if controller._error is not None:
                raise controller._error
            if controller._has_closed:
                raise StopAsyncIteration
            if not await _called(self._source, "pull", controller) and not controller._chunks:
                controller._changed.clear()
                await controller._changed.wait()
        chunk = controller._chunks.popleft()
        controller._changed.set()
        return chunk

    async def cancel(self, reason: Any = None) -> None:
        self._controller.close()
        await _called(self._source, "cancel", reason)

    aclose = cancel


class StreamWriter(Named):
    def __init__(self, stream: "WritableStream") -> None:
        self._stream = stream

    @property
    def ready(self) -> Any:
        return asyncio.ensure_future(self._stream._controller._room())

    async def write(self, chunk: Any) -> None:
        controller = self._stream._controller
        await controller._room()
        if not await _called(self._stream._transformer, "transform", chunk, controller):
            controller.enqueue(chunk)

    async def close(self) -> None:
        await _called(self._stream._transformer, "flush", self._stream._controller)
        self._stream._controller.close()

    async def abort(self, reason: Any = None) -> None:
        self._stream._controller.error(reason)

    def release_lock(self) -> None:
        """Do nothing: several writers are allowed."""


class WritableStream(Named):
    """The writable end of a TransformStream."""

    def __init__(self, controller: StreamController, transformer: Any) -> None:
        self._controller = controller
        self._transformer = transformer

    def get_writer(self) -> StreamWriter:
        return StreamWriter(self)

    async def close(self) -> None:
        await self.get_writer().close()


class TransformStream(Named):
    """A stream that transforms chunks, or passes them on without a `transformer`.
    `transformer` is a dict or object with `transform(chunk, controller)` and `flush(controller)`."""

    def __init__(self, transformer: Any = None) -> None:
        self.readable = ReadableStream()
        self.writable = WritableStream(self.readable._controller, transformer)

    @classmethod
    def new(cls, transformer: Any = None, *strategies: Any) -> "TransformStream":
        return cls(transformer)


async def _called(source: Any, name: str, *arguments: Any) -> bool:
    """Call a method of a source, if it has it; return whether it does."""
    function = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    if function is None:
        return False
    result = function(*arguments)
    if inspect.isawaitable(result):
        await result
    return True
