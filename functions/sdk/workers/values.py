"""Values of the author in the form in which they are stored or sent to other functions.

Plain values stay as they are; others become tagged forms.

A tag is a dict with one key that starts with `$`; an author's dict of that form is written as pairs. Values that can be sent but not stored are in
rpc_values.py.
"""

from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

from pilotlight.functions.channel import Failure
from pilotlight.functions.channel.frames import SCALARS, scalar
from workers.face import Buffer, Items, Record, key_of
from workers.javascript import Date
from workers.trouble import remote_error

DATE, SET, PAIRS, ERROR = "$date", "$set", "$pairs", "$error"
KEPT = "None, bool, numbers, str, bytes, list, dict, set, datetime, exceptions"

Packer = Callable[[Any, str], Any]
"""Gives the plain form of a further value, None where it has none."""
Unpackers = Mapping[str, Callable[[Any], Any]]


class DataCloneError(Failure, TypeError):
    """A value is of a kind that cannot be sent to another function, or be kept."""

    def __init__(self, message: str) -> None:
        super().__init__(f"DataCloneError: {message}", code="data_clone", status=400, name="DataCloneError")


def pack(value: Any, where: str, further: Packer = lambda value, where: None, known: str = KEPT) -> Any:
    """Return the plain form of a value. Raises DataCloneError with the position of a part that has none."""

    def packed(value: Any, where: str) -> Any:
        if isinstance(value, SCALARS):
            return scalar(value)
        if isinstance(value, (list, tuple)):
            return [packed(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return {SET: [packed(item, f"an item of {where}") for item in value]}
        if (found := further(value, where)) is not None:
            return found
        if isinstance(value, Mapping):
            return packed_dict(value, where)
        if isinstance(value, Date):
            value = value.to_py()
        if isinstance(value, date):  # a datetime is one
            return {DATE: value.isoformat()}
        if isinstance(value, Exception):
            name = value.name if isinstance(value, Failure) else type(value).__name__
            return {ERROR: {"name": name, "message": str(value)}}
        hint = "await it first" if hasattr(value, "__await__") else f"supported are {known}"
        verb = "kept" if known is KEPT else "sent"
        raise DataCloneError(f"{where} is of the type {type(value).__name__}, which cannot be {verb}; {hint}")

    def packed_dict(value: Mapping[Any, Any], where: str) -> Any:
        found = {_key(key, where): packed(item, f"{where}[{key!r}]") for key, item in value.items()}
        is_like_a_tag = len(found) == 1 and next(iter(found)).startswith("$")
        return {PAIRS: [[key, item] for key, item in found.items()]} if is_like_a_tag else found

    try:
        return packed(value, where)
    except RecursionError:
        raise DataCloneError(f"{where} is nested too deeply, or contains itself") from None


def _key(key: Any, where: str) -> str:
    """Return a key as an object of the platform has it: a number is its text."""
    try:
        return key_of(key, f"a dict in {where}")
    except TypeError as error:
        raise DataCloneError(str(error)) from None


def unpack(value: Any, further: Unpackers = {}) -> Any:  # noqa: B006 - it is read only
    """Undo `pack`: dicts, lists and bytes are those that answer to JavaScript's names, too."""
    if isinstance(value, list):
        return Items(unpack(item, further) for item in value)
    if isinstance(value, bytes):
        return Buffer(value)
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, inner = next(iter(value.items()))
        if tag in further:
            return further[tag](inner)
        if isinstance(inner, _INNER.get(tag, ())):
            return _unpacked(tag, inner, further)
    return Record({key: unpack(item, further) for key, item in value.items()})


_INNER: dict[Any, type] = {PAIRS: list, SET: list, DATE: str, ERROR: dict}


def _unpacked(tag: str, inner: Any, further: Unpackers) -> Any:
    if tag == PAIRS:
        return Record({key: unpack(item, further) for key, item in inner})
    if tag == SET:
        return {_hashable(unpack(item, further)) for item in inner}
    if tag == DATE:
        return _datetime(inner)
    return remote_error(Failure(inner["message"], code="exception", name=inner["name"]))


def _datetime(text: str) -> Any:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # stored by a version that did not write such dicts as pairs
        return Record({DATE: text})


def _hashable(item: Any) -> Any:
    """Return an item of a set.

    Tuples become lists when stored; items that are not hashable are written out.
    """
    if isinstance(item, list):
        item = tuple(_hashable(part) for part in item)
    try:
        hash(item)
    except TypeError:
        return repr(item)
    return item
