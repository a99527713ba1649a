"""Names that functions import from `js`: dates, bytes and text, timers, a part of `crypto`.

Each is a thin layer over Python's standard library. js.py refuses other names; no JavaScript is evaluated.
"""

import asyncio
import base64
import codecs
import hashlib
import inspect
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any

from workers.face import Buffer
from workers.trouble import text_of
from workers.typed_arrays import Uint8Array

DIGESTS = {"SHA-1": "sha1", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512", "MD5": "md5"}


class Date:
    """A moment in milliseconds since 1970; the time zone is UTC, as on the platform."""

    def __init__(self, value: Any = None) -> None:
        if value is None:
            self._ms = Date.now()
        elif isinstance(value, str):
            self._ms = Date.parse(value)
        elif isinstance(value, date):
            moment = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
            self._ms = round((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1e3)
        else:
            self._ms = int(value)

    @classmethod
    def new(cls, value: Any = None) -> "Date":
        return cls(value)

    @staticmethod
    def now() -> int:
        return time.time_ns() // 1_000_000

    @staticmethod
    def parse(text: str) -> int:
        """Return the milliseconds of a date in ISO 8601 or of an HTTP header. Raises ValueError."""
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = parsedate_to_datetime(text)
        return round((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1e3)

    def getTime(self) -> int:
        return self._ms

    valueOf = __int__ = getTime

    def __float__(self) -> float:
        return float(self._ms)

    def to_py(self, **_: Any) -> datetime:
        return datetime.fromtimestamp(self._ms / 1e3, UTC)

    def toISOString(self) -> str:
        return self.to_py().isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def toUTCString(self) -> str:
        return format_datetime(self.to_py(), usegmt=True)

    toJSON = __str__ = toISOString

    def getUTCFullYear(self) -> int:
        return self.to_py().year

    def getUTCMonth(self) -> int:
        return self.to_py().month - 1

    def getUTCDate(self) -> int:
        return self.to_py().day

    def getUTCDay(self) -> int:
        return self.to_py().isoweekday() % 7

    def getUTCHours(self) -> int:
        return self.to_py().hour

    def getUTCMinutes(self) -> int:
        return self.to_py().minute

    def getUTCSeconds(self) -> int:
        return self.to_py().second

    getFullYear, getMonth, getDate, getDay = getUTCFullYear, getUTCMonth, getUTCDate, getUTCDay
    getHours, getMinutes, getSeconds = getUTCHours, getUTCMinutes, getUTCSeconds


def json_text(value: Any, where: str, indent: Any = None) -> str:
    """Return JSON as JSON.stringify writes it: dates are strings, whole numbers have no fraction.
    Raises TypeError."""

    def other(item: Any) -> Any:
        if isinstance(item, (date, Date)):
            return Date(item).toISOString()
        raise TypeError(f"{where} contains a value of type {type(item).__name__!r}, which JSON cannot represent")

    separators = (",", ":") if not indent else (",", ": ")
    return json.dumps(_numbers(value), separators=separators, ensure_ascii=False, default=other, indent=indent or None)


def _numbers(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 1e21 else value
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


class TextEncoder:
    encoding = "utf-8"

    @classmethod
    def new(cls) -> "TextEncoder":
        return cls()

    def encode(self, text: str = "") -> Uint8Array:
        return Uint8Array(text.encode())


class TextDecoder:
    def __init__(self, encoding: str = "utf-8", options: Any = None) -> None:
        self.encoding = encoding
        self.fatal = bool((options or {}).get("fatal"))
        self._decoder: codecs.IncrementalDecoder | None = None  # of a stream whose last chunk is yet to come

    @classmethod
    def new(cls, encoding: str = "utf-8", options: Any = None, **named: Any) -> "TextDecoder":
        return cls(encoding, {**(options or {}), **named})

    def decode(self, data: Any = b"", options: Any = None, **named: Any) -> str:
        """Decode bytes. With the option `stream`, a character may continue in the next call's bytes."""
        is_stream = bool({**(options or {}), **named}.get("stream"))
        decoder = self._decoder
        if decoder is None:
            decoder = codecs.getincrementaldecoder(self.encoding)("strict" if self.fatal else "replace")
        self._decoder = decoder if is_stream else None
        return decoder.decode(bytes(data), final=not is_stream)


def btoa(text: str) -> str:
    return base64.b64encode(text.encode("latin-1")).decode()


def atob(text: str) -> str:
    """Decode base64, of which padding may be missing, as in JavaScript.
    White space is skipped; other characters raise ValueError."""
    data = "".join(str(text).split())
    return base64.b64decode(data + "=" * (-len(data) % 4), validate=True).decode("latin-1")


class _Timers:
    """Scheduled calls by id. Unlike `waitUntil`, they do not keep the isolate alive."""

    def __init__(self) -> None:
        self._last = 0
        self._running: dict[int, asyncio.TimerHandle] = {}

    def start(self, call: Callable[..., Any], delay_ms: float, args: Iterable[Any], *, again: bool) -> int:
        self._last += 1
        self._arm(self._last, call, max(0.0, delay_ms or 0.0) / 1e3, tuple(args), again)
        return self._last

    def stop(self, number: Any) -> None:
        if (handle := self._running.pop(number, None)) is not None:
            handle.cancel()

    def _arm(self, number: int, call: Callable[..., Any], delay_s: float, args: tuple[Any, ...], again: bool) -> None:
        def fire() -> None:
            self._running.pop(number, None)
            if again:
                self._arm(number, call, max(delay_s, 0.001), args, again)
            if inspect.isawaitable(made := call(*args)):
                asyncio.ensure_future(made).add_done_callback(_logged)

        self._running[number] = asyncio.get_running_loop().call_later(delay_s, fire)


def _logged(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        print(text_of(error), flush=True)


_timers = _Timers()


def set_timeout(call: Callable[..., Any], delay_ms: float = 0, *args: Any) -> int:
    return _timers.start(call, delay_ms, args, again=False)


def set_interval(call: Callable[..., Any], delay_ms: float = 0, *args: Any) -> int:
    return _timers.start(call, delay_ms, args, again=True)


def clear_timer(number: Any = None) -> None:
    _timers.stop(number)


class _Subtle:
    async def digest(self, algorithm: Any, data: Any) -> Buffer:
        name = (algorithm if isinstance(algorithm, str) else algorithm["name"]).upper()
        if name not in DIGESTS:
            raise TypeError(f"crypto.subtle.digest: {name!r} is not supported; use one of {', '.join(DIGESTS)}")
        return Buffer(hashlib.new(DIGESTS[name], bytes(data), usedforsecurity=False).digest())

    def __getattr__(self, name: str) -> Any:
        sentence = f"crypto.subtle has only digest here, and no {name!r}; use Python's hmac, hashlib or `cryptography`"
        raise AttributeError(sentence, name=name, obj=self)


class Crypto:
    subtle = _Subtle()

    def randomUUID(self) -> str:
        return str(uuid.uuid4())

    def getRandomValues(self, array: Any) -> Any:
        view = memoryview(array).cast("B")
        view[:] = os.urandom(len(view))
        return array


class Performance:
    timeOrigin = time.time() * 1e3

    def now(self) -> float:
        return time.time() * 1e3 - self.timeOrigin
