"""The names of JavaScript that functions import: `Object.fromEntries`, `JSON`, `console`, and those that are the SDK's own.

One that is not here is refused by a sentence of its own: there is no JavaScript behind them.
"""

import json as _json
import sys
from collections.abc import Iterable
from typing import Any

from workers.bindings.ai import AbortController, AbortSignal
from workers.bindings.face import Record, as_record
from workers.forms import Blob, File, FormData
from workers.headers import Headers
from workers.host import env
from workers.javascript import (
    Crypto,
    Date,
    Performance,
    TextDecoder,
    TextEncoder,
    Uint8Array,
    atob,
    btoa,
    clear_timer,
    set_interval,
    set_timeout,
)
from workers.outbound import fetch
from workers.request import Request
from workers.response import Response
from workers.urls import URL, URLSearchParams
from workers.websockets import WebSocketPair, WebSocketRequestResponsePair

__all__ = [
    "JSON",
    "URL",
    "AbortController",
    "AbortSignal",
    "Blob",
    "Date",
    "File",
    "FormData",
    "Headers",
    "Object",
    "Request",
    "Response",
    "TextDecoder",
    "TextEncoder",
    "URLSearchParams",
    "Uint8Array",
    "WebSocketPair",
    "WebSocketRequestResponsePair",
    "atob",
    "btoa",
    "clearInterval",
    "clearTimeout",
    "console",
    "crypto",
    "env",
    "fetch",
    "performance",
    "setInterval",
    "setTimeout",
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


class JSON:
    @staticmethod
    def parse(text: str) -> Any:
        return as_record(_json.loads(text))

    @staticmethod
    def stringify(value: Any, *_: Any) -> str:
        return _json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class _Console:
    def log(self, *values: Any) -> None:
        print(*values, flush=True)

    info = debug = log

    def error(self, *values: Any) -> None:
        print(*values, file=sys.stderr, flush=True)

    warn = error


console = _Console()
crypto = Crypto()
performance = Performance()
undefined = None
setTimeout, setInterval, clearTimeout, clearInterval = set_timeout, set_interval, clear_timer, clear_timer


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise ImportError(
        f"js.{name} is not offered: functions are CPython here, with no JavaScript behind them; use Python's own, "
        f"or one of {', '.join(__all__)}",
        name="js",
    )
