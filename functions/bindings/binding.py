"""The base of all bindings: their methods with request types, and the services that they use.

A request comes from a function's process, which may be hostile, so it is checked here, once: `call` passes on typed values only. The owner of the
channel calls `call`.
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
from pilotlight.functions.channel import Failure, frames
from pilotlight.functions.inference import Inference
from pilotlight.functions.manifest import Manifest
from pilotlight.support.database import Database, Databases, create

Body = AsyncIterator[bytes]


class BindingError(Failure):
    """A refusal that the function's author sees, as an exception of this name with this message."""

    def __init__(
        self, message: str, *, code: str | int = "invalid_argument", status: int = 400, name: str = "Error"
    ) -> None:
        super().__init__(message, code=code, status=status, name=name)


class Declaration(Protocol):
    """One binding of a manifest."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class FunctionResponse(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> list[tuple[str, str]]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def stream(self) -> Body | None: ...


class Called(Protocol):
    @property
    def value(self) -> Any: ...
    @property
    def body(self) -> Body | None: ...


class Functions(Protocol):
    """The site's functions, as bindings call them.
    An event's `options` may name a Durable Object: {object: class, id, name}."""

    async def ask(self, function: str, event: frames.FunctionEvent, body: Body | None = None) -> Called:
        """Have a function handle an event."""

    async def fetch(
        self, function: str, event: frames.FetchEvent, body: Body | None = None, *, is_socket: bool = False
    ) -> FunctionResponse:
        """Send a request to a function; with `is_socket` the body is a WebSocket's messages."""

    def add(self, manifest: Manifest, *, name: str) -> None:
        """Serve a further function under a name. Raises ManifestError."""

    def remove(self, name: str) -> None:
        """Stop serving the function; its open requests may finish."""


class MemoryBudget:
    """The memory for a function's streamed values at the site; 1,024 streams may be open at once."""

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
        """Add bytes. Raises BindingError above the budget, unless this call is the only one."""
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
    """The time by which bindings expire, delay and ring. A test may set it."""

    look_s = 30.0  # between two looks: the machine's clock may be set

    def now_s(self) -> float:
        """Return seconds since 1970."""
        return time.time()


CLOCK = Clock()
HISTORY_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Services:
    """The services of a site for its bindings.

    A binding that needs a missing service raises when it is opened.
    """

    databases: Databases = field(default_factory=Databases)
    inference: Inference | None = None  # the site's models
    usage: FunctionUsage | None = None  # counts usage of functions, if a ledger wants it
    functions: Functions | None = None
    function: str = "function"  # the function with these bindings
    max_bytes: int = 10 << 30  # of one database or bucket
    history_s: float = HISTORY_S  # for which D1 databases can be restored to any moment; 0: not at all
    memory: MemoryBudget = field(default_factory=MemoryBudget)  # the function's
    clock: Clock = CLOCK
    r2: Mapping[str, S3Place] = field(default_factory=dict)  # buckets at an S3 endpoint, by their R2 names

    def database(self, path: Path, schema: str) -> Database:
        """Return the one database at a path, with these tables."""

        def make(path: Path) -> Database:
            return Database(path, lambda connection: create(connection, schema), max_bytes=self.max_bytes)

        return self.databases.get(path, make)


RequestT = TypeVar("RequestT")
Method = Callable[..., Awaitable[Any]]


def method(function: Method) -> Method:
    """Mark a method that functions may call.
    The first parameter is the request, a msgspec.Struct; a second, `body`, is the stream."""
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
        """Call a method: it gives a plain value, a stream of bytes, or a StreamingReply, which is both.
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
    """A request without arguments."""


async def gathered(body: Body, limit_bytes: int, refusal: Callable[[int], BindingError], held: "HeldBytes") -> bytes:
    """Return a streamed body as one value, refused as soon as it is longer than the limit."""
    parts: list[bytes] = []
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > limit_bytes:
            raise refusal(size)
        held.add(len(chunk))
        parts.append(chunk)
    return b"".join(parts)


async def in_pieces(value: bytes, piece_bytes: int = 64 << 10) -> Body:
    for start in range(0, len(value), piece_bytes):
        yield value[start : start + piece_bytes]
        await asyncio.sleep(0)


class Pieces:
    """A value as a stream, whose bytes are held until it is closed."""

    def __init__(self, value: bytes, held: "HeldBytes", piece_bytes: int = 64 << 10) -> None:
        """Raises BindingError if the budget has no room for it."""
        held.add(len(value))
        self._value = value
        self._held = held
        self._piece_bytes = piece_bytes
        self._start = 0

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> bytes:
        piece = self._value[self._start : self._start + self._piece_bytes]
        self._start += len(piece)
        if not piece:
            await self.aclose()
            raise StopAsyncIteration
        await asyncio.sleep(0)
        return piece

    async def aclose(self) -> None:
        self._value = b""
        self._held.release()
