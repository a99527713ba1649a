"""`to_js` and its kin, for code that converts because it had to: dicts become records, whose keys are attributes, too."""

from collections.abc import Callable, Iterable
from typing import Any

from workers.bindings.face import Items, Record, as_record


class JsProxy:
    """Nothing is one; `isinstance(value, JsProxy)` is how functions ask whether they must convert."""


class JsException(Exception):
    """Nothing raises it: a binding's failure is a Python exception of its own."""


def to_js(
    value: Any, *, depth: int = -1, dict_converter: Callable[[Iterable[Any]], Any] | None = None, **_: Any
) -> Any:
    return as_record(value)


def create_proxy(value: Any, **_: Any) -> Any:
    return value


create_once_callable = create_proxy


def to_py(value: Any, **_: Any) -> Any:
    return value.to_py() if isinstance(value, (Record, Items)) else value
