"""Describe each error of an invalid configuration file by its key and the change to make.

msgspec.convert alone decides what is valid. A value that it refuses is split into parts, and each part is converted again, down to refused values
whose parts are all valid. So the errors are exactly those of `convert`. This module is only imported for an invalid file.
"""

import datetime
import difflib
import re
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from pilotlight.sites.table import Table

LONGEST_VALUE = 60  # maximum number of characters of a value in an error
# The end of a string: in the patterns of this project, and as a message shows it.
STRICT_END, SHOWN_END = r"\Z", "$"
NOUNS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "an array",
    datetime.datetime: "a date and time",
}
SILENT = (types.NoneType, msgspec.UnsetType)

Where = tuple[str | int, ...]  # keys and array positions, from the top of the file


def sentences(table: type[Table], values: Any) -> list[str]:
    return _errors(table, values, ())


def _errors(kind: Any, value: Any, where: Where) -> list[str]:
    """Return the errors in a value. `kind` is a type as the fields of tables declare it."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        of_key = f"{_named(where)}: " if where else ""
        return list(_within(kind, value, where)) or [f"{of_key}{_reason(kind, value, error, where)}"]
    return []


def _within(kind: Any, value: Any, where: Where) -> Iterator[str]:
    for alternative in map(_plain, _alternatives(kind)):
        origin, arguments = get_origin(alternative), get_args(alternative)
        if isinstance(value, dict) and _is_table(alternative):
            yield from _in_table(alternative, value, where)
        elif isinstance(value, dict) and origin is dict:
            for key, item in value.items():
                yield from _errors(arguments[0], key, (*where, key))
                yield from _errors(arguments[1], item, (*where, key))
        elif isinstance(value, list | tuple) and origin is tuple:
            for position, item in enumerate(value):
                yield from _errors(arguments[0], item, (*where, position))


def _in_table(table: type[Table], values: dict[Any, Any], where: Where) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(table)}
    for key, field in fields.items():
        here = (*where, key)
        if key not in values:
            if field.required:
                yield f"{_named(here)}: is missing"
        elif errors := _errors(field.type, values[key], here):
            yield from errors
        elif (rule := table.rules.get(field.name)) is not None:
            try:
                rule(msgspec.convert(values[key], field.type))
            except ValueError as error:
                yield f"{_named(here)}: {error}"
    for key in values:
        if key not in fields:
            yield _unknown((*where, key), sorted(fields))


def _unknown(where: Where, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(str(where[-1]), valid, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"unknown key {_named(where)!r}{hint} Valid here: {', '.join(valid)}"


def _reason(kind: Any, value: Any, error: msgspec.ValidationError, where: Where) -> str:
    """Return the reason why this value is refused although all its parts are valid."""
    if error.__cause__ is not None:  # the error of a table's `agree`
        return str(error.__cause__)
    wanted = _alternatives(kind)
    for alternative in wanted:
        if _is_of(type_ := _bounded(alternative), value):
            return _outside(type_, value) or str(error)
    expected = (
        f"must be {_listed([noun for alternative in wanted for noun in _nouns(alternative)])}, not {_shown(value)}"
    )
    if isinstance(value, dict) and any(_is_table(item) for plain in map(_plain, wanted) for item in get_args(plain)):
        return f"{expected}; each of its tables begins with [[{'.'.join(part for part in where if isinstance(part, str))}]]"
    return expected


def _is_of(type_: inspect.Type, value: Any) -> bool:
    if isinstance(value, bool):
        return isinstance(type_, inspect.BoolType)
    return (
        (isinstance(type_, inspect.IntType) and isinstance(value, int))
        or (isinstance(type_, inspect.FloatType) and isinstance(value, int | float))
        or (isinstance(type_, inspect.StrType) and isinstance(value, str))
        or (isinstance(type_, inspect.VarTupleType) and isinstance(value, list | tuple))
    )


def _outside(type_: inspect.Type, value: Any) -> str:
    """Return the bound of its type that `value` violates; empty if it violates none."""
    match type_:
        case inspect.FloatType() if isinstance(value, int) and abs(value) > sys.float_info.max:
            return "is a number with too many digits"
        case inspect.IntType() | inspect.FloatType():
            bounds = {"at least": type_.ge, "above": type_.gt, "at most": type_.le, "below": type_.lt}
            said = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
            return f"must be {' and '.join(said)}, not {_shown(value)}" if said else ""
        case inspect.StrType(pattern=str(pattern)) if re.search(pattern, value) is None:
            return f"must match {pattern.replace(STRICT_END, SHOWN_END)}, which {_shown(value)} does not"
        case inspect.StrType():
            return f"must have {_sizes(type_.min_length, type_.max_length, 'character')}, not {len(value)}"
        case inspect.VarTupleType():
            return f"must have {_sizes(type_.min_length, type_.max_length, 'item')}, not {len(value)}"
    return ""


def _nouns(kind: Any) -> list[str]:
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        return [repr(value) for value in get_args(plain)]
    return [NOUNS.get(get_origin(plain) or plain, "a table")]


def _shown(value: Any) -> str:
    match value:
        case dict():
            return "a table"
        case list() | tuple():
            return "an array"
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case int() if abs(value) > 10**LONGEST_VALUE:
            return "a number of many digits"  # Python raises an error when it converts such a number to text
        case str():
            value = repr(re.sub(r":.*@", ":...@", value, flags=re.DOTALL))  # hide the password in a URL
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _sizes(least: int | None, most: int | None, thing: str) -> str:
    bounds = [("at least", least), ("at most", most)]
    return " and ".join(f"{word} {size} {thing}{'' if size == 1 else 's'}" for word, size in bounds if size is not None)


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _named(where: Where) -> str:
    return ".".join(str(part) for part in where)


def _alternatives(kind: Any) -> list[Any]:
    """Return the types in a union, each with its own bounds, without None and UNSET."""
    plain = _plain(kind)
    if get_origin(plain) not in (Union, types.UnionType):
        return [kind]
    return [one for part in get_args(plain) if part not in SILENT for one in _alternatives(part)]


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _bounded(kind: Any) -> inspect.Type:
    type_ = inspect.type_info(kind)
    return type_.type if isinstance(type_, inspect.Metadata) else type_  # msgspec wraps types that have a description


def _is_table(kind: Any) -> TypeGuard[type[Table]]:
    return isinstance(kind, type) and issubclass(kind, Table)
