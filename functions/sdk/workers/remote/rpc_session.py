"""The session of one call between functions, over the call's two streams.

Each side can call the functions, targets and streams that the other side has sent. The session begins with the call, and ends when neither side holds
an object of the other. The site relays the bytes without decoding them. A message is a length and a msgpack list. This module is independent of
bindings.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from pilotlight.functions.channel.failure import Failure
from workers import host
from workers.http.body import as_bytes
from workers.remote.rpc_values import pack_sent, unpack_sent
from workers.remote.stubs import Handle, RpcStub, RpcTarget
from workers.trouble import describe, remote_error
from workers.values import DataCloneError

SESSION = "$session"  # the only key of a reply whose value follows in the session
MAX_MESSAGE_BYTES = 32 << 20
MAX_CALLS = 128  # concurrent calls of one side; more calls wait
PIECE_BYTES = 256 << 10  # maximum number of bytes of a stream that one call returns
HIDDEN = frozenset({"dup", "dispose", "constructor"})  # names of an RpcTarget that cannot be called
FIRST = 0  # number of the call that began the session


class RpcSession:
    def __init__(self) -> None:
        self._exports: dict[int, _Export] = {}
        self._imports: set[int] = set()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[Any]] = set()
        self._outbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._last_id = FIRST
        self._has_reader = False
        self._why_over: Failure | None = None

    @property
    def is_used(self) -> bool:
        """Tell whether one side holds an object that the other can call."""
        return bool(self._exports or self._imports)

    # -- the caller's side ------------------------------------------------------------------------------------------------------------

    async def outgoing(self) -> AsyncIterator[bytes]:
        """Yield the messages to send.
        Closing this generator ends the session, unless `result` was called to read the answer."""
        try:
            while True:
                while self._outbox:
                    yield self._outbox.popleft()
                self._news.clear()
                await self._news.wait()
        finally:
            if not self._has_reader:
                self.close(Failure("the call is over, and its arguments were released", code="session_over"))

    async def result(self, incoming: Any) -> Any:
        """Return the call's result; `incoming` is the answer's stream. Raises the call's exception."""
        first = self._asked[FIRST] = asyncio.get_running_loop().create_future()
        self._has_reader = True
        reading = asyncio.ensure_future(self._read(incoming))
        _reading.add(reading)
        reading.add_done_callback(_reading.discard)
        try:
            return await first
        except BaseException:
            self.close(Failure("the call that this belongs to was cancelled", code="session_over"))
            await incoming.aclose()
            raise
        finally:
            del self._asked[FIRST], first  # so that no reference from here keeps stubs in the result alive

    # -- the called side --------------------------------------------------------------------------------------------------------------

    async def serve(self, work: Callable[[], Coroutine[Any, Any, Any]], incoming: Any) -> AsyncIterator[bytes]:
        """Run `work`; yield the messages to send: its packed result, and those of later calls.
        Raises the exceptions of `work`."""
        first, reading = asyncio.ensure_future(work()), asyncio.ensure_future(self._read(incoming))
        first.add_done_callback(lambda _: self._news.set())
        is_told = False
        try:
            while True:
                if first.done() and not is_told:
                    is_told = True
                    self._send("result", FIRST, first.result())
                while self._outbox:
                    yield self._outbox.popleft()
                if is_told and not self._exports and not self._imports and not self._outbox:
                    return
                if not self._outbox and first.done() == is_told:
                    self._news.clear()
                    await self._news.wait()
        finally:
            self.close(Failure("the call is over, and its arguments were released", code="session_over"))
            for task in (first, reading):
                task.cancel()
            await asyncio.gather(first, reading, return_exceptions=True)

    # -- values -----------------------------------------------------------------------------------------------------------------------

    def pack(self, value: Any, where: str) -> Any:
        return pack_sent(value, where, self)

    def unpack(self, value: Any) -> "Received":
        """Unpack a received value, and collect the stubs in it."""
        received = Received(self)
        received.unpack(value)
        return received

    def export(self, value: Any) -> int | None:
        kind = _exported(value)
        if kind is None:
            return None
        if self._why_over is not None:
            raise self._why_over
        self._last_id += 1
        self._exports[self._last_id] = kind
        return self._last_id

    def import_(self, id: Any) -> Handle:
        self._imports.add(id)
        return Handle(_Remote(self, id))

    # -- calls ------------------------------------------------------------------------------------------------------------------------

    async def call(self, id: int, what: str, name: str | None, args: Any = (), kwargs: Any = None) -> Any:
        """Use the other side's object `id`: `what` is "call" for a method or "read" for a property.
        Returns the result; raises the other side's exception."""
        async with self._room:
            if self._why_over is not None:
                raise remote_error(self._why_over)
            self._last_id += 1
            number, answer = self._last_id, asyncio.get_running_loop().create_future()
            packed = [self.pack(list(args), "the arguments"), self.pack(dict(kwargs or {}), "the arguments")]
            host.leave()
            self._asked[number] = answer
            self._send(what, number, id, name, *packed)
            try:
                return await answer
            except asyncio.CancelledError:
                self._send("cancel", number)
                raise
            finally:
                self._asked.pop(number, None)

    def release(self, id: int) -> None:
        if id in self._imports:
            self._imports.discard(id)
            self._send("drop", id)

    def close(self, why: Failure) -> None:
        """End the session: pending calls fail, and received objects are released."""
        if self._why_over is None:
            self._why_over = why
            self._imports.clear()
            for answer in tuple(self._asked.values()):
                if not answer.done():
                    answer.set_exception(remote_error(why))
            for task in tuple(self._answering):
                task.cancel()
            for id in tuple(self._exports):
                self._drop(id)
        self._news.set()

    def _send(self, *message: Any) -> None:
        if self._why_over is None:
            data = msgspec.msgpack.encode(message)
            if len(data) > MAX_MESSAGE_BYTES:
                raise DataCloneError(f"{len(data)} bytes in one call, of at most {MAX_MESSAGE_BYTES}; send a stream")
            self._outbox.append(len(data).to_bytes(4, "big") + data)
            self._news.set()

    async def _read(self, incoming: Any) -> None:
        why = Failure("the call is over, and its results were released", code="session_over")
        buffer = bytearray()
        try:
            async for chunk in incoming:
                buffer += chunk
                while len(buffer) >= 4 and len(buffer) >= (end := 4 + int.from_bytes(buffer[:4], "big")):
                    message = bytes(memoryview(buffer)[4:end])
                    del buffer[:end]
                    self._take(*msgspec.msgpack.decode(message))
                if len(buffer) > MAX_MESSAGE_BYTES + 4:
                    raise Failure("the other function sent a message that is too large", code="session_broken")
        except Failure as failure:
            why = failure
        except Exception as error:
            why = Failure(f"the other function broke the protocol of calls: {error!r}", code="session_broken")
        finally:
            self.close(why)
            await incoming.aclose()

    def _take(self, what: str, number: int, *rest: Any) -> None:
        if what in ("call", "read"):
            if len(self._answering) >= 2 * MAX_CALLS:
                raise Failure("the other function made too many concurrent calls", code="session_broken")
            task = asyncio.ensure_future(self._answer(what, number, *rest))
            task.set_name(str(number))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif what == "drop":
            self._drop(number)
        elif what == "cancel":
            for task in tuple(self._answering):
                if task.get_name() == str(number):
                    task.cancel()
        elif (answer := self._asked.get(number)) is not None and not answer.done():
            if what == "result":
                answer.set_result(self.unpack(rest[0]).value)
            else:
                code, status, name, message, detail = rest
                answer.set_exception(remote_error(Failure(message, code=code, status=status, name=name, detail=detail)))

    async def _answer(self, what: str, number: int, id: int, name: str | None, args: Any, kwargs: Any) -> None:
        brought = Received(self)
        try:
            export = self._exports.get(id)
            if export is None:
                raise Failure("the called object was disposed of", code="disposed")
            args, kwargs = unpack_sent(args, brought), unpack_sent(kwargs, brought)

            async def act() -> Any:
                value = export.asked(what, name, args, kwargs)
                while inspect.isawaitable(value):
                    value = await value
                return self.pack(value, "what it returned")

            self._send("result", number, await (act() if export.runner is None else export.runner(act)))
        except Exception as error:
            told = describe(error)
            self._send("error", number, told.code, told.status, told.name, told.message, told.detail[-65536:])
        finally:
            brought.release()

    def _drop(self, id: int) -> None:
        export = self._exports.pop(id, None)
        if export is not None and not any(other.value is export.value for other in self._exports.values()):
            export.dispose()
        self._news.set()


class Received:
    """The value of one message, with the stubs in it."""

    def __init__(self, session: RpcSession) -> None:
        self.value: Any = None
        self._session = session
        self._stubs: list[RpcStub] = []

    def unpack(self, value: Any) -> None:
        self.value = unpack_sent(value, self)

    def stub(self, id: int) -> RpcStub:
        stub = RpcStub(self._session.import_(id))
        self._stubs.append(stub)
        return stub

    def stream(self, id: int) -> "_Pulled":
        return _Pulled(self._session.import_(id))

    def release(self) -> None:
        """Release the stubs, because the call that brought them has ended."""
        for stub in self._stubs:
            stub.dispose()


class _Remote:
    """An object of the other side, known by its number."""

    def __init__(self, session: RpcSession, id: int) -> None:
        self._session = session
        self._id = id

    def call(self, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        return self._session.call(self._id, "call", name, args, kwargs)

    def read(self, name: str) -> Awaitable[Any]:
        return self._session.call(self._id, "read", name)

    def release(self) -> None:
        self._session.release(self._id)


class _Pulled:
    """A stream of the other side, read by one call per chunk."""

    def __init__(self, handle: Handle) -> None:
        handle.hold()
        self._handle: Handle | None = handle

    def __aiter__(self) -> "_Pulled":
        return self

    async def __anext__(self) -> bytes:
        piece = None if self._handle is None else await self._handle.remote.call(None, (), {})
        if piece is None:
            await self.aclose()
            raise StopAsyncIteration
        return bytes(piece)

    async def aclose(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.release()

    def __del__(self) -> None:
        if self._handle is not None:
            self._handle.release_soon()


class _Export:
    """An object of this side that the other side may call.
    If a Durable Object sent it, calls run as events of that object."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.runner = host.event_runner.get()

    def asked(self, what: str, name: str | None, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def dispose(self) -> None:
        """Release the exported object."""


class _Function(_Export):
    def asked(self, what: str, name: str | None, args: Any, kwargs: Any) -> Any:
        if name is not None or what != "call":
            raise _no_member(name)
        return self.value(*args, **kwargs)


class _Target(_Export):
    """An RpcTarget with its class's methods and properties, or a stub that forwards to a third function."""

    def asked(self, what: str, name: str | None, args: Any, kwargs: Any) -> Any:
        if name is None and isinstance(self.value, RpcStub):
            return self.value(*args, **kwargs)
        if name is None or name.startswith("_"):
            raise _no_member(name)
        if isinstance(self.value, RpcTarget) and (name in HIDDEN or not hasattr(type(self.value), name)):
            raise _no_member(name)
        found = getattr(self.value, name)
        if what == "read":
            return found
        if not callable(found):
            raise _no_member(name)
        return found(*args, **kwargs)

    def dispose(self) -> None:
        if callable(dispose := getattr(self.value, "dispose", None)) and isinstance(self.value, (RpcTarget, RpcStub)):
            dispose()


class _Source(_Export):
    """A stream: each call returns a chunk, or None at the end."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.runner = None
        self._iterator = aiter(value)
        self._left = b""

    async def asked(self, what: str, name: str | None, args: Any, kwargs: Any) -> Any:
        while not self._left:
            try:
                self._left = as_bytes(await anext(self._iterator))
            except StopAsyncIteration:
                return None
        piece, self._left = self._left[:PIECE_BYTES], self._left[PIECE_BYTES:]
        return piece

    def dispose(self) -> None:
        if (aclose := getattr(self._iterator, "aclose", None)) is not None:
            closing = asyncio.ensure_future(aclose())
            _reading.add(closing)
            closing.add_done_callback(_ended)


def _exported(value: Any) -> _Export | None:
    if isinstance(value, RpcStub):
        return _Target(value.dup())
    if isinstance(value, RpcTarget) or hasattr(type(value), "__is_stub__"):
        return _Target(value)
    if hasattr(value, "__aiter__"):
        return _Source(value)
    if callable(value) and not isinstance(value, type):
        return _Function(value)
    return None


def _no_member(name: str | None) -> Failure:
    sentence = "it is no function" if name is None else f"it has no method or property {name!r} that can be reached"
    return Failure(f"the RPC receiver does not do this: {sentence}", code="no_method", name="TypeError")


_reading: set["asyncio.Future[Any]"] = set()  # keeps tasks alive that nothing else references


def _ended(task: "asyncio.Future[Any]") -> None:
    _reading.discard(task)
    if not task.cancelled():
        task.exception()  # the reader has left, so the error does not matter
