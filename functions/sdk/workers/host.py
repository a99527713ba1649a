"""State of this process: the function's environment, and the channel to the runtime."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableSet
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from pilotlight.functions.channel.connection import Channel

T = TypeVar("T")


class Env:
    """`self.env`: every binding, var and secret of the manifest, by name."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self))) or "nothing"
        raise AttributeError(f"the manifest binds no {name!r}; it binds {known}", name=name, obj=self)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __repr__(self) -> str:
        return f"Env({', '.join(sorted(vars(self)))})"


env = Env()


@contextmanager
def patch_env(given: Mapping[str, Any] | None = None, **named: Any) -> Iterator[None]:
    """Replace values of the environment within a `with` block; for tests."""
    before = dict(vars(env))
    vars(env).update({**dict(given or {}), **named})
    try:
        yield
    finally:
        vars(env).clear()
        vars(env).update(before)


before_leaving: set[Callable[[], None]] = set()
"""Callbacks that run before any message leaves the process, so that a Durable Object commits its writes before others see their effects."""
EventRunner = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
event_runner: ContextVar[EventRunner | None] = ContextVar("event_runner", default=None)
"""Runs a handler that is called later as an event of the current Durable Object; None outside of Durable Objects."""
listening_sockets: ContextVar[MutableSet[Any] | None] = ContextVar("listening_sockets", default=None)
"""The current Durable Object's WebSockets with listeners, which end with it; None outside of Durable Objects."""
max_message_bytes = 1 << 20  # per WebSocket message; the site sets it
_channel: Channel | None = None


_loop: asyncio.AbstractEventLoop | None = None


def connect(channel: Channel | None) -> None:
    global _channel, _loop
    _channel = channel
    _loop = None if channel is None else asyncio.get_running_loop()


def leave() -> None:
    """Run the callbacks of `before_leaving`. Called before a message leaves the process."""
    while before_leaving:
        before_leaving.pop()()


def channel() -> Channel:
    leave()
    if _channel is None:
        raise RuntimeError("bindings and fetch work inside a handler, and not while the module is imported")
    return _channel


def call_now(binding: str, method: str, **kwargs: Any) -> Any:
    """Call a binding's method from code that cannot await; the process blocks until the reply."""
    if _channel is None:
        raise RuntimeError("storage works inside a handler, and not while the module is imported")
    return _channel.call_now(binding, method, **kwargs)


def can_run_sync() -> bool:
    return _loop is not None


def is_running_here() -> bool:
    """Return whether the function's event loop is running in this thread."""
    return _loop is not None and asyncio._get_running_loop() is _loop


def run_sync(awaitable: Awaitable[T]) -> T:
    """Return an awaitable's result in code that cannot await.
    On the event loop's own thread, other tasks run meanwhile inside this call; nested calls therefore return in reverse order."""
    if _loop is None:
        raise RuntimeError("run_sync works inside a handler, and not while the module is imported")
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), _loop).result()
    caller, loop = asyncio.current_task(), _loop
    ready = loop._ready  # type: ignore[attr-defined]  # internals of asyncio's loops, 3.11 to 3.14
    owed = len(ready)  # number of handles that the outer loop's current iteration will still take
    task = asyncio.ensure_future(awaitable)
    if caller is not None:
        asyncio.tasks._leave_task(loop, caller)
    try:
        while not task.done():
            loop._run_once()  # type: ignore[attr-defined]
    finally:
        if caller is not None:
            asyncio.tasks._enter_task(loop, caller)
        ready.extend(_nothing(loop) for _ in range(owed))
    return task.result()


def _nothing(loop: asyncio.AbstractEventLoop) -> asyncio.Handle:
    """Return a cancelled handle, which the loop takes without running anything."""
    handle = asyncio.Handle(lambda: None, (), loop)
    handle.cancel()
    return handle


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class LateChannel:
    """The channel for bindings that are created before the event loop exists."""

    async def call(self, binding: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return await channel().call(binding, method, *args, **kwargs)

    async def begin(self, *args: Any, **kwargs: Any) -> Any:
        return await channel().begin(*args, **kwargs)
