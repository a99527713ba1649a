"""`to_js` and similar conversions, for code written for Pyodide.

A dict becomes a Record, whose keys are attributes, too.
"""

from collections.abc import Callable, Iterable
from typing import Any

from pilotlight.functions.channel.failure import Failure as JsException
from workers.face import Items, Record, as_record
from workers.host import can_run_sync, run_sync

__all__ = [
    "JsException",
    "JsProxy",
    "can_run_sync",
    "create_once_callable",
    "create_proxy",
    "destroy_proxies",
    "jsnull",
    "run_sync",
    "to_js",
    "to_py",
]

jsnull = None


class JsProxy:
    """Has no instances:
    `isinstance(value, JsProxy)` is how functions ask whether they must convert a value."""


class ConversionError(Exception):
    """Never raised, because nothing is converted."""


JsArray = JsAsyncGenerator = JsAsyncIterable = JsAsyncIterator = JsBuffer = JsCallable = JsDoubleProxy = JsGenerator = (
    JsProxy
)
JsIterable = JsIterator = JsMap = JsMutableMap = JsOnceCallable = JsPromise = JsTypedArray = JsProxy


class PyProxy:
    """A wrapper for a value that is passed to JavaScript; here `destroy` has nothing to free."""

    def __init__(self, value: Any) -> None:
        self.__wrapped__ = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def destroy(self) -> None:
        """Do nothing: there is no JavaScript object to free."""


def to_js(
    value: Any, *, depth: int = -1, dict_converter: Callable[[Iterable[Any]], Any] | None = None, **_: Any
) -> Any:
    return as_record(value)


def create_proxy(value: Any, **_: Any) -> Any:
    """Return a proxy that behaves like the value and can be destroyed; iterables are returned as they are."""
    return value if hasattr(value, "__iter__") or hasattr(value, "__aiter__") else PyProxy(value)


create_once_callable = create_proxy


def destroy_proxies(proxies: Any) -> None:
    """Do nothing: there are no proxies."""


def to_py(value: Any, **_: Any) -> Any:
    return value.to_py() if isinstance(value, (Record, Items)) else value
