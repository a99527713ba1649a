"""The base class of bindings, with checked request types, and the services that bindings use.

Requests come from a function's process, which may be hostile. `Binding.call`, which the owner of the channel calls, checks each request once; methods
get typed values only.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, get_type_hints

import msgspec

from pilotlight.functions.bindings.storage.s3 import S3Place
from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import ExchangeResult
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.inference import Inference
from pilotlight.functions.manifest import Manifest
from pilotlight.support.database import Database, Databases, create

Body = AsyncIterator[bytes]
PIECE_BYTES = 64 << 10
NOT_DELIVERED = ("overloaded", "closing", "not_found")  # error codes of a function that has not seen its event


class BindingError(Failure):
    """A binding refuses a request. The function's author sees an exception with this name and message."""

    def __init__(
        self, message: str, *, code: str | int = "invalid_argument", status: int = 400, name: str = "Error"
    ) -> None:
        super().__init__(message, code=code, status=status, name=name)


class FunctionResponse(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> list[tuple[str, str]]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def stream(self) -> Body | None: ...


class Functions(Protocol):
    """The site's functions, as bindings call them.
    `options` of an event may name a Durable Object by the keys `object` (its class), `id` and `name`."""

    async def ask(self, function: str, event: frames.FunctionEvent, body: Body | None = None) -> ExchangeResult:
        """Send an event to a function; return its result."""

    async def fetch(
        self, function: str, event: frames.FetchEvent, body: Body | None = None, *, is_socket: bool = False
    ) -> FunctionResponse:
        """Send an HTTP request to a function. With `is_socket`, `body` carries the messages of a WebSocket."""

    def add(self, manifest: Manifest, *, name: str) -> None:
        """Start to serve a function under a name. Raises ManifestError."""

    def remove(self, name: str) -> None:
        """Stop serving the function; its open requests may finish."""


class MemoryBudget:
    """A limit on the bytes that the open calls of one function hold at the site.
    It is needed because a function may have 1,024 open streams."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def hold(self) -> "HeldBytes":
        return HeldBytes(self)


class HeldBytes:
    """Memory held by one call; use as `with`, or call `release`."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._size = 0

    def add(self, size: int) -> None:
        """Reserve bytes. Raises BindingError above the budget, unless no other call holds memory."""
        others = self._budget.used - self._size
        if others and self._budget.used + size > self._budget.max_bytes:
            used, most = self._budget.used, self._budget.max_bytes
            sentence = f"this function's open calls hold {used} bytes already, of at most {most}; wait for some of them"
            raise BindingError(sentence, code="overloaded", status=429)
        self._size += size
        self._budget.used += size

    def release(self) -> None:
        self._budget.used -= self._size
        self._size = 0

    def __enter__(self) -> "HeldBytes":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Clock:
    """The wall clock for expiries, delays and alarms; tests may replace it."""

    look_s = 30.0  # longest wait before the machine's clock is read again, in case it was changed

    def now_s(self) -> float:
        """Return the Unix time in seconds."""
        return time.time()

    def schedule_s(self) -> float:
        """Return the Unix time in seconds by which cron triggers fire."""
        return self.now_s()


CLOCK = Clock()


@dataclass(frozen=True)
class BindingLimits:
    """Limits of bindings that no file sets."""

    kv_value_bytes: int = 25 << 20
    dataset_points: int = 5_000_000  # of Analytics Engine
    index_vectors: int = 100_000  # of Vectorize
    index_block_bytes: int = 4 << 20  # vectors that one query holds in memory at once
    dynamic_workers: int = (
        8  # loaded ones per loading function; the least recently used one is unloaded to load another
    )
    ai_wait_s: float = 60.0  # how long a call of a model waits for capacity before it is refused


HISTORY_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Services:
    """The services of a site for the bindings of one function.
    A binding whose service is missing raises BindingError when it is opened."""

    databases: Databases = field(default_factory=Databases)
    inference: Inference | None = None  # the site's models
    usage: FunctionUsage | None = None  # records usage of functions for a router's ledger
    functions: Functions | None = None
    function: str = "function"  # name of the function that has these bindings
    max_bytes: int = 10 << 30  # limit per database or bucket
    history_s: float = HISTORY_S  # how far back D1 databases and objects can be restored; 0 disables their history
    memory: MemoryBudget = field(default_factory=MemoryBudget)  # shared by all bindings of the function
    limits: BindingLimits = BindingLimits()
    clock: Clock = CLOCK
    r2: Mapping[str, S3Place] = field(default_factory=dict)  # buckets at S3 endpoints, by R2 bucket name

    def database(self, path: Path, schema: str) -> Database:
        """Return the database at a path, shared by all who open it; create missing tables of the schema."""

        def make(path: Path) -> Database:
            return Database(path, lambda connection: create(connection, schema), max_bytes=self.max_bytes)

        return self.databases.get(path, make)


RequestT = TypeVar("RequestT")
Method = Callable[..., Awaitable[Any]]


def method(function: Method) -> Method:
    """Mark a method that functions may call.
    Its first parameter is the request, a msgspec.Struct; an optional second one, `body`, is a stream."""
    function.__is_method__ = True  # type: ignore[attr-defined]
    return function


class _Door(NamedTuple):
    request: type[msgspec.Struct]
    function: Method
    takes_body: bool


class Binding:
    kind: ClassVar[str]
    _doors: ClassVar[Mapping[str, _Door]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        doors = dict(cls._doors)
        for name, function in vars(cls).items():
            if getattr(function, "__is_method__", False):
                parameters = list(inspect.signature(function).parameters)
                request = get_type_hints(function)[parameters[1]]
                doors[name] = _Door(request, function, len(parameters) > 2)
        cls._doors = doors

    async def call(
        self, method: str, args: list[Any] | tuple[Any, ...], kwargs: Mapping[str, Any], body: Body | None = None
    ) -> Any:
        """Call a method; return a plain value, a stream of bytes, or a StreamingReply.
        Raises BindingError."""
        door = self._doors.get(method)
        if door is None:
            raise BindingError(f"{self.kind} has no method {method!r}", code="no_such_method", name="TypeError")
        request = self._parsed(method, door.request, args, kwargs)
        if body is not None and not door.takes_body:
            raise BindingError(f"{self.kind}.{method} takes no stream", name="TypeError")
        return await (door.function(self, request, body) if door.takes_body else door.function(self, request))

    def _parsed(
        self, method: str, kind: type[RequestT], args: list[Any] | tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RequestT:
        names = kind.__struct_fields__  # type: ignore[attr-defined]
        if len(args) > len(names):
            message = f"{self.kind}.{method} takes {len(names)} arguments and got {len(args)}"
            raise BindingError(message, name="TypeError")
        try:
            return msgspec.convert({**dict(zip(names, args, strict=False)), **kwargs}, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            what, _, place = str(error).partition(" - at `$.")
            where = f" of {place.removesuffix('`')}" if place else ""
            raise BindingError(f"{self.kind}.{method}{where}: {what}", name="TypeError") from None

    async def close(self) -> None:
        """Release the binding's own resources; shared ones stay open."""


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty request."""


async def gathered(body: Body, limit_bytes: int, refusal: Callable[[int], BindingError], held: "HeldBytes") -> bytes:
    """Return a streamed body as one value. Raises `refusal(size)` as soon as the body exceeds the limit."""
    parts: list[bytes] = []
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > limit_bytes:
            raise refusal(size)
        held.add(len(chunk))
        parts.append(chunk)
    return b"".join(parts)


class Pieces:
    """A value as a stream of pieces.
    Its bytes count against a budget, if it has one, until the stream is closed."""

    def __init__(self, value: bytes, held: "HeldBytes | None" = None) -> None:
        """Reserve memory for the value. Raises BindingError if the budget is exhausted."""
        if held is not None:
            held.add(len(value))
        self._value = value
        self._held = held
        self._start = 0

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> bytes:
        piece = self._value[self._start : self._start + PIECE_BYTES]
        self._start += len(piece)
        if not piece:
            await self.aclose()
            raise StopAsyncIteration
        await asyncio.sleep(0)
        return piece

    async def aclose(self) -> None:
        self._value = b""
        if self._held is not None:
            self._held.release()
