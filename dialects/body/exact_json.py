"""JSON whose integers beyond 64 bits are refused instead of rounded.

The JSON reader would turn such an integer into the nearest double. Database ids of 64 bits pass; larger numbers must be sent as strings. Knows JSON
only, not the fields of a body.
"""

import json
import re
from typing import Any

import orjson

from pilotlight.wire.errors import ApiError

_MANY_DIGITS = re.compile(rb"[0-9]{19}")
_MOST_SIGNS = 20  # of an integer of 64 bits
_RANGE = range(-(2**63), 2**64)
# Fields that hold the conversation's history. Its calls may have integers of any size, because answers contain them.
_HISTORIES = ("messages", "input")
_ARGUMENTS = ("input", "arguments")  # fields of a call, if they are not text


def exact_loads(raw: bytes | str) -> Any:
    """Raises orjson.JSONDecodeError, and ApiError for a number that would become another one."""
    value = orjson.loads(raw)
    refuse_inexact(raw)
    return value


def refuse_inexact(raw: bytes | str) -> None:
    """Raise ApiError for a number of a JSON document that would become another one."""
    if _MANY_DIGITS.search(raw if isinstance(raw, bytes) else raw.encode()):
        json.loads(raw, parse_int=_check, parse_float=len)


def body_values(raw: bytes) -> Any:
    """Return the value of a body, with exact integers in the calls of its history.

    Raises orjson.JSONDecodeError."""
    value = orjson.loads(raw)  # fast, and strict
    if not isinstance(value, dict) or not _MANY_DIGITS.search(raw):
        return value
    try:
        exact = json.loads(raw)
        return {name: _with_calls(part, exact[name]) if name in _HISTORIES else part for name, part in value.items()}
    except RecursionError:  # so deep a body is refused by its depth
        return value


def _with_calls(value: Any, exact: Any) -> Any:
    """Return a value with the arguments of its calls as they are in `exact`."""
    if isinstance(value, list):
        return [_with_calls(part, other) for part, other in zip(value, exact, strict=True)]
    if isinstance(value, dict):
        return {
            name: exact[name] if name in _ARGUMENTS and isinstance(part, dict) else _with_calls(part, exact[name])
            for name, part in value.items()
        }
    return value


def refuse_inexact_fields(raw: bytes) -> None:
    """Raise ApiError if a number outside the conversation's history would lose digits."""
    if _MANY_DIGITS.search(raw):
        fields = json.loads(raw)
        refuse_inexact(json.dumps({name: value for name, value in fields.items() if name not in _HISTORIES}))


def _check(digits: str) -> None:
    if len(digits) > _MOST_SIGNS or int(digits) not in _RANGE:
        message = f"the number {digits[:40]} is beyond 64 bits, which JSON parsers would round: send it as a string"
        raise ApiError("invalid_request", message)
