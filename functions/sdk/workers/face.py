"""Common parts of the bindings in functions.

Names work in both spellings, options in both forms, and values behave as on the platform. There, Python gets JavaScript objects, on which attributes
and items are the same, and `to_py()` copies. Here, subclasses of dict, list and bytes behave like that.
"""

import difflib
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol


class Channel(Protocol):
    async def call(self, binding: str, method: str, *args: Any, **kwargs: Any) -> Any: ...

    async def begin(
        self,
        binding: str,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        body: AsyncIterator[bytes] | None = None,
    ) -> Any: ...


class Named:
    """A base class whose methods are written in snake_case and also found under camelCase."""

    def __getattr__(self, name: str) -> Any:
        snake = snake_case(name)
        if snake != name and not name.startswith("_"):
            try:
                return getattr(self, snake)
            except AttributeError:
                pass
        public = sorted(key for key in dir(type(self)) if not key.startswith("_"))
        message = f"{type(self).__name__} has no {name!r}; it has {', '.join(public)}"
        raise AttributeError(message, name=name, obj=self)

    __iter__: Any = None  # otherwise Python would iterate with __getitem__ and integers

    def __getitem__(self, name: str) -> Any:
        """Return an attribute: on the platform attributes and items are the same."""
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None


class Face(Named):
    def __init__(self, channel: Channel, name: str, options: Mapping[str, Any]) -> None:
        self._channel = channel
        self._name = name
        self._options = options

    async def _call(self, method: str, **kwargs: Any) -> Any:
        return await self._channel.call(self._name, method, **kwargs)

    async def _begin(self, method: str, body: AsyncIterator[bytes] | None = None, **kwargs: Any) -> Any:
        """Call a method; return the value and its stream."""
        return await self._channel.begin(self._name, method, (), kwargs, body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"


class Record(dict[str, Any]):
    """A JavaScript object: `row.name` and `row["name"]` are the same.
    A key that is also the name of a dict's method can only be read as an item."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no {name!r} here; the keys are {', '.join(map(repr, self)) or 'none'}", name=name, obj=self
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_py(self, **_: Any) -> dict[str, Any]:
        return {key: _to_py(value) for key, value in self.items()}

    def object_keys(self) -> "Items":
        return Items(self)

    def object_values(self) -> "Items":
        return Items(self[key] for key in self)

    def object_entries(self) -> "Items":
        return Items(Items((key, self[key])) for key in self)

    def as_object_map(self, **_: Any) -> "Record":
        return self


class Items(list[Any]):
    """A JavaScript array."""

    @property
    def length(self) -> int:
        return len(self)

    def to_py(self, **_: Any) -> list[Any]:
        return [_to_py(value) for value in self]


class Buffer(bytes):
    """A JavaScript ArrayBuffer."""

    @property
    def byteLength(self) -> int:
        return len(self)

    length = byteLength

    @property
    def buffer(self) -> "Buffer":
        return self

    def tobytes(self) -> bytes:
        """Return the bytes; memoryview has this method, too."""
        return bytes(self)

    def to_py(self, **_: Any) -> memoryview:
        return memoryview(self)

    def to_bytes(self) -> bytes:
        return bytes(self)

    def to_string(self, encoding: str = "utf-8") -> str:
        return self.decode(encoding)


def as_record(value: Any) -> Any:
    """Return a value whose dicts, lists and bytes also have JavaScript's attributes."""
    if isinstance(value, dict):
        return Record({key: as_record(item) for key, item in value.items()})
    if isinstance(value, list):
        return Items(as_record(item) for item in value)
    if isinstance(value, bytes):
        return Buffer(value)
    return value


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])|(?<=[A-Z])([A-Z])(?=[a-z])", r"_\1\2", name).lower()


def key_of(key: Any, where: str) -> str:
    """Return a key as str; numbers are converted, as on the platform."""
    if isinstance(key, (int, float)) and not isinstance(key, bool):
        return str(int(key) if float(key).is_integer() else key)
    if not isinstance(key, str):
        raise TypeError(f"{where} takes a key that is a str, and not {type(key).__name__}")
    return str(key)


def options_of(given: Any, named: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return options from a dict and from keyword arguments, under their snake_case names.
    An unknown option raises TypeError; the platform ignores it."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: the options must be a dict, not {type(given).__name__}")
    options: dict[str, Any] = {}
    for key, value in [*given.items(), *named.items()]:
        name = snake_case(key) if isinstance(key, str) else repr(key)
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{where} has no option {key!r}{hint}")
        if value is not None:
            options[name] = value
    return options


def body_of(value: Any, where: str) -> tuple[bytes | None, AsyncIterator[bytes] | None]:
    """Return a value as (bytes, None), or as (None, stream of bytes)."""
    if isinstance(value, str):
        return value.encode(), None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), None
    if hasattr(value, "__aiter__"):
        return None, _as_bytes(value, where)
    if isinstance(inner := getattr(value, "body", None), (bytes, bytearray)) or hasattr(inner, "__aiter__"):
        return body_of(inner, where)
    if callable(raw := getattr(value, "raw", None)):  # a Blob
        return raw(), None
    raise TypeError(f"{where} takes str, bytes or a stream of them, not {type(value).__name__}")


async def _as_bytes(stream: Any, where: str) -> AsyncIterator[bytes]:
    async for chunk in stream:
        if isinstance(chunk, str):
            yield chunk.encode()
        elif isinstance(chunk, (bytes, bytearray, memoryview)):
            yield bytes(chunk)
        else:
            raise TypeError(f"{where}: the stream gave {type(chunk).__name__}, neither bytes nor str")


def _to_py(value: Any) -> Any:
    return value.to_py() if isinstance(value, (Record, Items)) else value
