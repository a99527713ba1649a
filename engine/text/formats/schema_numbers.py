"""Checks of numbers in JSON schemas that the grammar library, which uses doubles, cannot represent.

Such numbers are refused with their keyword, never rounded.
"""

import json
from collections.abc import Iterator
from typing import Any

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_INT64 = 2**63 - 1  # as a maximum: the library's largest integer, to which the next double is clamped
_decoder = json.JSONDecoder()


class InexactNumberError(ValueError):
    """A number of a schema that would be enforced as another one."""

    def __init__(self, keyword: str, number: int) -> None:
        super().__init__(
            f"{keyword} has the number {number}, which is not exact as a double; write it as a string, or omit {keyword}"
        )


def check_schema(schema: Any) -> None:
    """Check a schema. Raises InexactNumberError."""
    for keyword, number in _inexact(schema):
        raise InexactNumberError(keyword, number)


def check_lark(text: str) -> None:
    """Check the schemas inside a grammar. Raises InexactNumberError."""
    at = text.find("%json")
    while at >= 0:
        at += len("%json")
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            schema, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # the library itself refuses invalid JSON
            pass
        else:
            check_schema(schema)
        at = text.find("%json", at)


def without_inexact(schema: Any) -> Any:
    """Return a schema without the keywords that have such numbers."""
    if isinstance(schema, list):
        return [without_inexact(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: part if key in ("const", "enum") else without_inexact(part)
        for key, part in schema.items()
        if not any(_wrong(key, part))
    }


def _inexact(schema: Any) -> Iterator[tuple[str, int]]:
    """Yield keywords and their numbers that cannot be enforced, in a schema and its subschemas."""
    level = [schema]
    while level:
        part = level.pop()
        if isinstance(part, list):
            level += part
        elif isinstance(part, dict):
            for key, value in part.items():
                yield from ((key, number) for number in _wrong(key, value))
                if key not in ("const", "enum", "default", "examples"):
                    level.append(value)


def _wrong(key: str, value: Any) -> Iterator[int]:
    if key in ("const", "enum"):
        yield from (number for number in _integers(value) if not _is_exact(number))
    elif key in _BOUNDS and isinstance(value, int) and not _is_exact_bound(key, value):
        yield value


def _integers(value: Any) -> Iterator[int]:
    level = [value]
    while level:
        part = level.pop()
        if isinstance(part, dict):
            level += part.values()
        elif isinstance(part, list):
            level += part
        elif isinstance(part, int) and not isinstance(part, bool):
            yield part


def _is_exact_bound(key: str, number: int) -> bool:
    if key.startswith("exclusive"):  # the library adds or subtracts 1, as a double
        return abs(number) < 2**53
    return _is_exact(number) or (key == "maximum" and number == _MAX_INT64)


def _is_exact(number: int) -> bool:
    return -(2**63) < number < 2**63 and int(float(number)) == number and abs(float(number)) < 2.0**63
