"""The first error of an invalid body, with the path of its field, such as messages[0].content.

Each field is checked again in the declared order. Valid requests do not need this module, so it is imported with the first invalid one. It is
independent of the fields' meanings.
"""

import difflib
import operator
from collections.abc import Iterable
from functools import cache
from types import NoneType
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect, structs

from pilotlight.dialects.body.bodies import Body, names_of
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.wire.errors import ApiError


def first_error(values: dict[str, Any], body: type[Body], where: str = "") -> ApiError | None:
    values = body.cleaned(values)
    for field in _fields(body):
        at = f"{where}.{field.name}" if where else field.name
        if field.name in values:
            error = _of_field(values[field.name], field, body, at)
        else:
            error = ApiError("invalid_request", f"{at} is required", param=at) if field.required else None
        if error is not None:
            return error
    unknown = next((name for name in values if name not in names_of(body)), None)
    return None if unknown is None else unknown_parameter(unknown, names_of(body), where)


# Similarity from which a name is suggested; 1 means equal. For max_tokens, "maxTokens" has 0.82, and min_tokens, which means something else, has 0.8.
NEAR = 0.82


def unknown_parameter(name: str, valid: Iterable[str], where: str = "") -> ApiError:
    nearest = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=NEAR)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    at = f"{where}.{name}"[:100] if where else name[:100]
    return ApiError("unknown_parameter", f"unknown parameter {at!r}{hint}", param=at)


@cache
def _fields(body: type[Body]) -> tuple[structs.FieldInfo, ...]:
    return structs.fields(body)


@cache
def _described(declared: Any) -> inspect.Type:
    return inspect.type_info(declared)


def _of_field(value: Any, field: structs.FieldInfo, body: type[Body], at: str) -> ApiError | None:
    read = body.READERS.get(field.name)
    try:
        value = value if read is None or value is None else read(value)
    except ValidationError as error:
        return ApiError(error.word, f"{at}{error.where}: {error}", param=f"{at}{error.where}")
    is_plain = field.name not in body.PARTS
    if is_plain and _fits(value, field.type):  # for token ids of a prompt: 3 ns each, against 1,100 ns by `_of_value`
        return None
    return _of_value(value, _described(field.type), at)


def _fits(value: Any, declared: Any) -> bool:
    try:
        msgspec.convert(value, declared)
    except msgspec.ValidationError:
        return False
    return True


def _of_value(value: Any, declared: inspect.Type, at: str) -> ApiError | None:
    if isinstance(declared, inspect.UnionType):
        return _of_union(value, declared, at)
    if (sentence := _misfit(value, declared)) is not None:
        return ApiError("invalid_request", f"{at}: {sentence}", param=at)
    if isinstance(declared, inspect.StructType):
        assert issubclass(declared.cls, Body)
        return None if _is_good(value, declared.cls) else first_error(value, declared.cls, at)
    if isinstance(declared, inspect.ListType | inspect.VarTupleType):
        found = (_of_value(item, declared.item_type, f"{at}[{position}]") for position, item in enumerate(value))
        return next((error for error in found if error is not None), None)
    if isinstance(declared, inspect.DictType):
        found = (_of_value(item, declared.value_type, f"{at}.{key[:100]}") for key, item in value.items())
        return next((error for error in found if error is not None), None)
    return None


def _is_good(values: dict[str, Any], body: type[Body]) -> bool:
    try:
        return _fits(body.in_one_form(values), body)
    except ValidationError:
        return False


def _of_union(value: Any, declared: inspect.UnionType, at: str) -> ApiError | None:
    if value is None and declared.includes_none:
        return None
    branches = [branch for branch in declared.types if not isinstance(branch, inspect.NoneType)]
    if len(branches) == 1:
        return _of_value(value, branches[0], at)
    if any(_of_value(value, branch, at) is None for branch in branches):
        return None
    kinds = " or ".join(_JSON_TYPES[type(branch)].name for branch in branches)
    return ApiError("invalid_request", f"{at}: must be {kinds}", param=at)


class _JsonType(NamedTuple):
    name: str  # follows "must be" in messages
    types: tuple[type, ...]


_JSON_TYPES: dict[type[inspect.Type], _JsonType] = {
    inspect.StrType: _JsonType("a string", (str,)),
    inspect.IntType: _JsonType("a whole number", (int,)),
    inspect.FloatType: _JsonType("a number", (int, float)),
    inspect.BoolType: _JsonType("true or false", (bool,)),
    inspect.NoneType: _JsonType("null or left out", (NoneType,)),
    inspect.DictType: _JsonType("an object", (dict,)),
    inspect.StructType: _JsonType("an object", (dict,)),
    inspect.ListType: _JsonType("a list", (list,)),
    inspect.VarTupleType: _JsonType("a list", (list,)),
}
_BOUNDS = (
    ("ge", operator.ge, "at least"),
    ("gt", operator.gt, "more than"),
    ("le", operator.le, "at most"),
    ("lt", operator.lt, "less than"),
)


def _misfit(value: Any, declared: inspect.Type) -> str | None:
    """Return why the value itself is invalid, without its nested values; None if it is valid."""
    if isinstance(declared, inspect.LiteralType):
        return None if value in declared.values else f"must be {_alternatives(declared.values)}"
    kind = _JSON_TYPES.get(type(declared))
    if kind is None:  # every value is allowed
        return None
    if type(value) not in kind.types:
        return f"must be {kind.name}"
    for name, holds, words in _BOUNDS:
        if (bound := getattr(declared, name, None)) is not None and not holds(value, bound):
            return f"must be {words} {bound:.15g}" if isinstance(bound, float) else f"must be {words} {bound}"
    if (least := getattr(declared, "min_length", None)) is not None and len(value) < least:
        return "must not be empty" if least == 1 else f"must have at least {least}"
    if (most := getattr(declared, "max_length", None)) is not None and len(value) > most:
        return f"may have at most {most} characters" if isinstance(value, str) else f"may have at most {most} items"
    return None


def _alternatives(values: Iterable[Any]) -> str:
    *others, last = (f'"{value}"' for value in values)
    return f"{', '.join(others)} or {last}" if others else last
