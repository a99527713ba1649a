"""An author's values in the form in which they are stored or sent to other functions.

Plain values stay as they are; others become tagged forms. A tagged form is a dict with one key that starts with `$`; an author's own dict of that
form is written as pairs. Values that can be sent but not stored are in rpc_values.py.
"""

from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import SCALARS, scalar
from workers.face import Buffer, Items, Record, key_of
from workers.javascript import Date
from workers.trouble import remote_error

DATE, SET, PAIRS, ERROR = "$date", "$set", "$pairs", "$error"
KEPT = "None, bool, numbers, str, bytes, list, dict, set, datetime, exceptions"

Packer = Callable[[Any, str], Any]
"""Returns the plain form of a value of a kind that this module does not handle; None for any other value."""
Unpackers = Mapping[str, Callable[[Any], Any]]


class DataCloneError(Failure, TypeError):
    """A value cannot be stored or sent to another function."""

    def __init__(self, message: str) -> None:
        super().__init__(f"DataCloneError: {message}", code="data_clone", status=400, name="DataCloneError")


def pack(value: Any, where: str, further: Packer = lambda value, where: None, known: str = KEPT) -> Any:
    """Return the plain form of a value. Raises DataCloneError, with the path of a part that has none."""

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
        if isinstance(value, date):  # datetime is a subclass
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
    """Return a dict's key as str; numbers are converted, as on the platform."""
    try:
        return key_of(key, f"a dict in {where}")
    except TypeError as error:
        raise DataCloneError(str(error)) from None


def unpack(value: Any, further: Unpackers = {}) -> Any:  # noqa: B006 - it is read only
    """Reverse `pack`; the resulting dicts, lists and bytes have JavaScript's attributes, too."""
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
    except ValueError:  # an author's dict, stored by a version that did not write such dicts as pairs
        return Record({DATE: text})


def _hashable(item: Any) -> Any:
    """Return an item that a set can hold.
    Lists, which were tuples before they were stored, become tuples; other unhashable items become their repr."""
    if isinstance(item, list):
        item = tuple(_hashable(part) for part in item)
    try:
        hash(item)
    except TypeError:
        return repr(item)
    return item
