"""The names of JavaScript that functions may import: `Object`, `JSON`, `console` and more.

Other names raise ImportError with an explanation, because there is no JavaScript engine.
"""

import asyncio as _asyncio
import json as _json
import sys
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote as _quote
from urllib.parse import unquote as _unquote

from workers.face import Buffer, Items, Record, as_record
from workers.host import env
from workers.http.abort_signal import AbortController, AbortSignal
from workers.http.caches import CacheStorage
from workers.http.forms import Blob, File, FormData
from workers.http.headers import Headers
from workers.http.html_rewriter import HTMLRewriter
from workers.http.outbound import fetch
from workers.http.request import Request
from workers.http.response import Response
from workers.http.streams import ReadableStream, TransformStream, WritableStream
from workers.http.urls import URL, URLSearchParams
from workers.javascript import (
    Crypto,
    Date,
    Performance,
    TextDecoder,
    TextEncoder,
    atob,
    btoa,
    clear_timer,
    set_interval,
    set_timeout,
)
from workers.javascript import json_text as _json_text
from workers.sockets.websockets import WebSocket, WebSocketPair, WebSocketRequestResponsePair
from workers.typed_arrays import (
    BigInt64Array,
    BigUint64Array,
    DataView,
    Float32Array,
    Float64Array,
    Int8Array,
    Int16Array,
    Int32Array,
    Uint8Array,
    Uint8ClampedArray,
    Uint16Array,
    Uint32Array,
)

__all__ = [
    "JSON",
    "URL",
    "AbortController",
    "AbortSignal",
    "Array",
    "ArrayBuffer",
    "BigInt64Array",
    "BigUint64Array",
    "Blob",
    "Boolean",
    "DataView",
    "Date",
    "Error",
    "File",
    "Float32Array",
    "Float64Array",
    "FormData",
    "HTMLRewriter",
    "Headers",
    "Int8Array",
    "Int16Array",
    "Int32Array",
    "Map",
    "Number",
    "Object",
    "Promise",
    "ReadableStream",
    "Request",
    "Response",
    "Set",
    "String",
    "TextDecoder",
    "TextEncoder",
    "TransformStream",
    "URLSearchParams",
    "Uint8Array",
    "Uint8ClampedArray",
    "Uint16Array",
    "Uint32Array",
    "WebSocket",
    "WebSocketPair",
    "WebSocketRequestResponsePair",
    "WritableStream",
    "atob",
    "btoa",
    "caches",
    "clearInterval",
    "clearTimeout",
    "console",
    "crypto",
    "decodeURIComponent",
    "encodeURIComponent",
    "env",
    "fetch",
    "globalThis",
    "performance",
    "queueMicrotask",
    "setInterval",
    "setTimeout",
    "structuredClone",
    "undefined",
]


class Object:
    @staticmethod
    def new() -> Record:
        return Record()

    @staticmethod
    def fromEntries(entries: Iterable[Any]) -> Record:
        return Record(as_record(dict(entries)))

    @staticmethod
    def entries(value: Any) -> list[list[Any]]:
        return [[key, item] for key, item in dict(value).items()]

    @staticmethod
    def keys(value: Any) -> list[str]:
        return list(value)

    @staticmethod
    def values(value: Any) -> list[Any]:
        return list(dict(value).values())

    @staticmethod
    def assign(target: Any, *sources: Any) -> Any:
        for source in sources:
            target.update(source or {})
        return target


class Array(Items):
    @classmethod
    def new(cls, *values: Any) -> "Array":
        return cls([None] * values[0] if len(values) == 1 and isinstance(values[0], int) else values)

    @staticmethod
    def of(*values: Any) -> Items:
        return Items(as_record(list(values)))

    @staticmethod
    def isArray(value: Any) -> bool:
        return isinstance(value, (list, tuple))

    def push(self, *values: Any) -> int:
        self.extend(values)
        return len(self)


setattr(Array, "from", staticmethod(lambda values, *_: Items(as_record(list(values)))))  # `from` is a keyword in Python


class Map(dict[Any, Any]):
    @classmethod
    def new(cls, entries: Iterable[Any] = ()) -> "Map":
        return cls(entries)

    def set(self, key: Any, value: Any) -> "Map":
        self[key] = value
        return self

    def has(self, key: Any) -> bool:
        return key in self

    @property
    def size(self) -> int:
        return len(self)

    def to_py(self, **_: Any) -> dict[Any, Any]:
        return dict(self)


class Set(set[Any]):
    @classmethod
    def new(cls, values: Iterable[Any] = ()) -> "Set":
        return cls(values)

    def has(self, value: Any) -> bool:
        return value in self

    @property
    def size(self) -> int:
        return len(self)

    def to_py(self, **_: Any) -> set[Any]:
        return set(self)


class Error(Exception):
    name = "Error"

    @classmethod
    def new(cls, message: Any = "", *_: Any) -> "Error":
        return cls(message)

    @property
    def message(self) -> str:
        return str(self)


class ArrayBuffer(Buffer):
    @classmethod
    def new(cls, length: int = 0) -> "ArrayBuffer":
        return cls(length)


class Promise:
    """The static methods of Promise; any awaitable counts as a promise."""

    @staticmethod
    async def resolve(value: Any = None) -> Any:
        return await value if hasattr(value, "__await__") else value

    @staticmethod
    async def reject(reason: Any = None) -> Any:
        raise reason if isinstance(reason, BaseException) else Error(str(reason))

    @staticmethod
    async def all(values: Iterable[Any]) -> Items:
        return Items(await _asyncio.gather(*map(Promise.resolve, values)))

    @staticmethod
    async def allSettled(values: Iterable[Any]) -> Items:
        results = await _asyncio.gather(*map(Promise.resolve, values), return_exceptions=True)
        return Items(
            Record(status="rejected", reason=result)
            if isinstance(result, BaseException)
            else Record(status="fulfilled", value=result)
            for result in results
        )

    @staticmethod
    async def race(values: Iterable[Any]) -> Any:
        tasks = [_asyncio.ensure_future(Promise.resolve(value)) for value in values]
        try:
            done, _ = await _asyncio.wait(tasks, return_when=_asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()


def Number(value: Any = 0) -> int | float:
    """Convert to a number as JavaScript does; NaN if that is impossible."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return float("nan")
    return int(number) if number.is_integer() else number


def String(value: Any = "") -> str:
    return str(value)


def Boolean(value: Any = None) -> bool:
    return bool(value)


def encodeURIComponent(text: Any) -> str:
    return _quote(str(text), safe="-_.!~*'()")


def decodeURIComponent(text: Any) -> str:
    return _unquote(str(text), errors="strict")


def structuredClone(value: Any) -> Any:
    return as_record(_copied(value))


def queueMicrotask(call: Callable[[], Any]) -> None:
    _asyncio.get_running_loop().call_soon(call)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


class JSON:
    @staticmethod
    def parse(text: str) -> Any:
        return as_record(_json.loads(text))

    @staticmethod
    def stringify(value: Any, replacer: Any = None, space: Any = None) -> str:
        return _json_text(value, "the argument of JSON.stringify", space)


class _Console:
    def log(self, *values: Any) -> None:
        print(*values, flush=True)

    info = debug = log

    def error(self, *values: Any) -> None:
        print(*values, file=sys.stderr, flush=True)

    warn = error


caches = CacheStorage()
console = _Console()
crypto = Crypto()
performance = Performance()
undefined = None
globalThis = sys.modules[__name__]
setTimeout, setInterval, clearTimeout, clearInterval = set_timeout, set_interval, clear_timer, clear_timer


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise ImportError(
        f"js.{name} is not offered: functions run in CPython, without JavaScript; use Python's own, "
        f"or one of {', '.join(__all__)}",
        name="js",
    )
