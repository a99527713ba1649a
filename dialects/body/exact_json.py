"""JSON whose integers beyond 64 bits are refused instead of rounded, and its encoding.

The JSON parser would round such an integer to the nearest double. Database ids of 64 bits are allowed; larger numbers must be sent as strings.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from pilotlight.wire.errors import ApiError

_MANY_DIGITS = re.compile(rb"[0-9]{19}")
_MOST_SIGNS = 20  # maximum number of characters of a 64-bit integer
_RANGE = range(-(2**63), 2**64)
# Fields with the conversation's history. Calls in it may have integers of any size, because answers contain such calls.
_HISTORIES = ("messages", "input")
_ARGUMENTS = ("input", "arguments")  # fields with a call's arguments, if they are objects


def exact_loads(raw: bytes | str) -> Any:
    """Parse JSON. Raises orjson.JSONDecodeError, and ApiError if a number would be rounded."""
    value = orjson.loads(raw)
    refuse_inexact(raw)
    return value


def refuse_inexact(raw: bytes | str) -> None:
    """Raise ApiError if a number of a JSON document would be rounded."""
    if _MANY_DIGITS.search(raw if isinstance(raw, bytes) else raw.encode()):
        with _shallow():
            json.loads(raw, parse_int=_check, parse_float=len)


def encoded(value: Any) -> bytes:
    """Encode a value of `exact_loads`, or a part of one.
    Raises ApiError if it is nested too deep."""
    with _shallow():
        return orjson.dumps(value)


@contextmanager
def _shallow() -> Iterator[None]:
    """Raise ApiError if the work in this scope fails on a value that is nested too deep.
    orjson writes 254 levels and reads 1024, and Python's `json` reads nearly as many."""
    try:
        yield
    except (RecursionError, orjson.JSONEncodeError):
        raise ApiError("invalid_request", "the JSON is nested too deep") from None


def body_values(raw: bytes) -> Any:
    """Parse a body; integers in the calls of the conversation's history stay exact.

    Raises orjson.JSONDecodeError."""
    value = orjson.loads(raw)  # fast and strict
    if not isinstance(value, dict) or not _MANY_DIGITS.search(raw):
        return value
    try:
        exact = json.loads(raw)
        return {name: _with_calls(part, exact[name]) if name in _HISTORIES else part for name, part in value.items()}
    except RecursionError:  # a body that is nested too deep is refused later
        return value


def _with_calls(value: Any, exact: Any) -> Any:
    """Return `value` with the arguments of its calls replaced by those in `exact`."""
    if isinstance(value, list):
        return [_with_calls(part, other) for part, other in zip(value, exact, strict=True)]
    if isinstance(value, dict):
        return {
            name: exact[name] if name in _ARGUMENTS and isinstance(part, dict) else _with_calls(part, exact[name])
            for name, part in value.items()
        }
    return value


def refuse_inexact_fields(raw: bytes) -> None:
    """Raise ApiError if a number outside the conversation's history would be rounded."""
    if _MANY_DIGITS.search(raw):
        with _shallow():
            fields = json.loads(raw)
            rest = json.dumps({name: value for name, value in fields.items() if name not in _HISTORIES})
        refuse_inexact(rest)


def _check(digits: str) -> None:
    if len(digits) > _MOST_SIGNS or int(digits) not in _RANGE:
        message = f"the number {digits[:40]} is beyond 64 bits, which JSON parsers would round: send it as a string"
        raise ApiError("invalid_request", message)
