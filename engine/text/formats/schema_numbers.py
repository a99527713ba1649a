"""Checks JSON schemas for numbers that the grammar library cannot represent, because it uses doubles.

Such numbers are refused with their keyword, and never rounded.
"""

import json
from collections.abc import Iterator
from typing import Any

from pilotlight.engine.text.formats.subschemas import with_subschemas

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_INT64 = 2**63 - 1  # no double, but allowed as a maximum: the library clamps the next double, 2**63, to it
_decoder = json.JSONDecoder()


class InexactNumberError(ValueError):
    """A number in a schema is not exact as a double, so the library would enforce another number."""

    def __init__(self, keyword: str, number: int) -> None:
        super().__init__(
            f"{keyword} has the number {number}, which is not exact as a double; write it as a string, or omit {keyword}"
        )


def check_schema(schema: Any) -> None:
    """Raise InexactNumberError if a schema has an inexact number."""
    for keyword, number in _inexact(schema):
        raise InexactNumberError(keyword, number)


def check_lark(text: str) -> None:
    """Raise InexactNumberError if a schema inside a grammar has an inexact number."""
    at = text.find("%json")
    while at >= 0:
        at += len("%json")
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            schema, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # ignored, because the library itself refuses invalid JSON
            pass
        else:
            check_schema(schema)
        at = text.find("%json", at)


def without_inexact(schema: Any) -> Any:
    """Return a schema without the keywords that have inexact numbers."""
    if isinstance(schema, list):
        return [without_inexact(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if not any(_wrong(key, part))}
    return with_subschemas(kept, without_inexact)


def _inexact(schema: Any) -> Iterator[tuple[str, int]]:
    """Yield the keywords with inexact numbers in a schema and its subschemas, each with its number."""
    level = [schema]
    while level:
        part = level.pop()
        if isinstance(part, list):
            level += part
        elif isinstance(part, dict):
            yield from ((key, number) for key, value in part.items() for number in _wrong(key, value))
            with_subschemas(part, level.append)  # only to visit them


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
    if key.startswith("exclusive"):  # the library adds 1 to the bound, or subtracts 1, in doubles
        return abs(number) < 2**53
    return _is_exact(number) or (key == "maximum" and number == _MAX_INT64)


def _is_exact(number: int) -> bool:
    return -(2**63) < number < 2**63 and int(float(number)) == number and abs(float(number)) < 2.0**63
