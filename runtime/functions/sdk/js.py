"""The few names of JavaScript that functions import: `Object.fromEntries`, `JSON`, `console`, and those that are the SDK's own."""

import json as _json
import sys
from collections.abc import Iterable
from typing import Any

from workers.bindings.face import Record, as_record
from workers.forms import Blob, File, FormData
from workers.headers import Headers
from workers.host import env
from workers.outbound import fetch
from workers.request import Request
from workers.response import Response
from workers.websockets import WebSocketPair, WebSocketRequestResponsePair

__all__ = [
    "JSON",
    "Blob",
    "File",
    "FormData",
    "Headers",
    "Object",
    "Request",
    "Response",
    "WebSocketPair",
    "WebSocketRequestResponsePair",
    "console",
    "env",
    "fetch",
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
