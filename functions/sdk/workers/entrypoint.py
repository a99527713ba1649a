"""Base classes for a function's module: entrypoints, Durable Objects, workflows, and their context."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from workers.host import Env

T = TypeVar("T")
_background: set["asyncio.Future[Any]"] = set()
_of_objects: Counter[tuple[str, str]] = Counter()  # pieces of background work by Durable Object (class, id)
on_background: Callable[[int], None] = lambda count: None  # noqa: E731 - set by the isolate, which reports the count
on_object_background: Callable[[tuple[str, str], int], None] = lambda object, count: None  # noqa: E731 - set by the isolate, too


class Context:
    """`self.ctx`: background work, and the `props` of the service binding that called."""

    _object: tuple[str, str] | None = None  # class and id of the Durable Object that has this context

    def __init__(self, props: Any = None) -> None:
        self.props = props

    def wait_until(self, awaitable: Awaitable[Any]) -> None:
        """Continue work after the response, within the function's limits. Exceptions are logged."""
        if not inspect.isawaitable(awaitable):
            raise TypeError(f"waitUntil takes an awaitable, and not {type(awaitable).__name__}")
        task = asyncio.ensure_future(_logged(awaitable))
        _background.add(task)
        on_background(len(_background))
        task.add_done_callback(_forget)
        if (object := self._object) is not None:
            _count(object, 1)
            task.add_done_callback(lambda done: _count(object, -1))

    def pass_through_on_exception(self) -> None:
        """Do nothing: there is no origin server to which the request could be passed."""

    waitUntil, passThroughOnException = wait_until, pass_through_on_exception


class _Entrypoint:
    def __init__(self, ctx: Any, env: Env) -> None:
        self.ctx = ctx
        self.env = env


class WorkerEntrypoint(_Entrypoint):
    """The base of `Default` and of named entrypoints.
    It has `fetch`, `scheduled`, `queue`, and other methods, which service bindings can call."""


class DurableObject(_Entrypoint):
    """The base of Durable Object classes: one instance per id."""


class WorkflowEntrypoint(_Entrypoint):
    """The base of workflows, with `run(event, step)`.
    A step that has finished is not run again, even if the process crashes."""


def wait_until(awaitable: Awaitable[Any]) -> None:
    """Call `ctx.waitUntil` for the current request, without a context object."""
    Context().wait_until(awaitable)


def handler(function: T) -> T:
    """Return the function unchanged: a decorator for plain handlers.
    `on_fetch`, `on_scheduled` and `on_queue` are found by name."""
    return function


def python_from_rpc(value: T) -> T:
    return value


def python_to_rpc(value: T) -> T:
    return value


async def _logged(awaitable: Awaitable[Any]) -> None:
    try:
        await awaitable
    except Exception as error:
        from workers.trouble import print_trouble

        print_trouble("waitUntil", error)


def _forget(task: "asyncio.Future[Any]") -> None:
    _background.discard(task)
    on_background(len(_background))


def _count(object: tuple[str, str], change: int) -> None:
    _of_objects[object] += change
    on_object_background(object, _of_objects[object])
    if not _of_objects[object]:
        del _of_objects[object]
