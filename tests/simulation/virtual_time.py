"""An event loop in virtual time, shared by simulated processes that can be suspended, killed and given a wrong clock.

Time advances only while no callback can run: an hour of timeouts takes milliseconds, and a seed always runs the same steps. A process is a context
variable: callbacks belong to the process in whose context they were scheduled. Those of a suspended process wait. A killed process no longer affects
others (virtual_network.py), and its tasks are cancelled. Work for threads runs at once, in the loop.
"""

# mypy: disable-error-code="override"
# typeshed types the arguments of callbacks by a TypeVarTuple, and this loop calls anything.

import asyncio
import contextvars
import gc
import heapq
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal
from unittest.mock import patch
from weakref import WeakValueDictionary

EPOCH_S = 1_800_000_000.0
BEGINNING_S = 10_000.0  # the monotonic clock at the start
MOST_TURNS = 100_000  # turns of the loop without advancing time; more mean that a task never waits
THREAD_S = 0.001  # simulated duration of work in a thread

PROCESS: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("simulated process", default=None)


class Process:
    """A simulated process."""

    def __init__(self, name: str, host: str) -> None:
        """`host` is the address of the process's machine."""
        self.name = name
        self.host = host
        self.state: Literal["running", "suspended", "dead"] = "running"
        self.clock_ahead_s = 0.0  # error of the wall clock; the monotonic clock is exact
        self.tasks: WeakValueDictionary[int, asyncio.Task[Any]] = WeakValueDictionary()  # in the order of their starts
        self.num_tasks = 0
        self.held: deque[_Handle] = deque()  # callbacks that came due while it was suspended
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)


class _Handle(asyncio.TimerHandle):
    """A handle without the debugging aids of asyncio's, because a schedule makes thousands of them."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled")
    __eq__, __hash__, __repr__ = object.__eq__, object.__hash__, object.__repr__

    def __init__(
        self, when: float, callback: Callable[..., object], arguments: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self._when, self.callback, self.arguments, self.context = when, callback, arguments, context
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel, and free the objects to which the callback refers; the handle is skipped when it comes due."""
        self.is_cancelled, self.callback, self.arguments = True, _do_nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled


class NothingToRunError(Exception):
    """Raised if no callback is scheduled, so that the awaited event can never come."""


class BusyLoopError(Exception):
    """Raised if callbacks follow each other without end while no time passes."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now = BEGINNING_S
        self.failures: list[str] = []  # unhandled exceptions of living processes
        self._due: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = count()
        self._turns = 0  # turns since time last advanced
        self.set_exception_handler(_note_failure)
        self.set_task_factory(_task_of_process)

    def start(self, process: Process, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Run a coroutine as a task of a process."""
        return self.create_task(work, name=name, context=process.context.copy())

    def suspend(self, process: Process) -> None:
        if process.state == "running":
            process.state = "suspended"

    def resume(self, process: Process) -> None:
        if process.state == "suspended":
            process.state = "running"
            held, process.held = process.held, deque()
            self._due.extend(held)

    def kill(self, process: Process) -> None:
        self.resume(process)
        process.state = "dead"
        for task in tuple(process.tasks.values()):
            task.cancel()

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Handle(self.now, callback, args, contextvars.copy_context() if context is None else context)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Handle(when, callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future = self.create_future()
        deliver: Callable[[Any], None]
        try:
            deliver, outcome = future.set_result, func(*args)
        except Exception as error:
            deliver, outcome = future.set_exception, error
        self.call_later(THREAD_S, lambda: None if future.done() else deliver(outcome))
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no executor."""

    def _run_once(self) -> None:
        self._pass_time()
        due = self._due
        for _ in range(len(due)):
            handle = due.popleft()
            if handle.is_cancelled:
                continue
            process = handle.context.get(PROCESS)
            if process is not None and process.state == "suspended":
                process.held.append(handle)
                continue
            try:
                handle.context.run(handle.callback, *handle.arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle.callback!r} raised", "exception": error})

    def _pass_time(self) -> None:
        timers, due = self._timers, self._due
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not due:
            if not timers:
                raise NothingToRunError
            if timers[0][0] > self.now:
                self.now, self._turns = timers[0][0], 0
        self._turns += 1
        if self._turns > MOST_TURNS:
            raise BusyLoopError(f"after {self.now - BEGINNING_S:.3f} s: {[each.callback for each in due][:3]}")
        while timers and timers[0][0] <= self.now:
            due.append(heapq.heappop(timers)[2])


def _do_nothing() -> None:
    pass


def _task_of_process(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.num_tasks += 1
        process.tasks[process.num_tasks] = task
        if process.state == "dead":
            task.cancel()
    return task


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    process = PROCESS.get()
    if process is None or process.state != "dead":
        name = "the world" if process is None else process.name
        loop.failures.append(f"{name}: {context['message']}: {context.get('exception')!r}")


@contextmanager
def virtual_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Replace the clocks of `time` by the clock of the loop, and random numbers by numbers from the seed; close the loop at the end.

    Garbage is not collected meanwhile: finalizers would run at other steps each time.
    """

    chance = random.Random(seed)

    def wall_s() -> float:
        process = PROCESS.get()
        return EPOCH_S + loop.now + (0.0 if process is None else process.clock_ahead_s)

    clocks: dict[str, Callable[[], float]] = {
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "monotonic_ns": lambda: round(1e9 * loop.now),
        "perf_counter_ns": lambda: round(1e9 * loop.now),
        "time": wall_s,
        "time_ns": lambda: round(1e9 * wall_s()),
    }
    before = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(_as_defaults({getattr(time, name): clock for name, clock in clocks.items()}))
        for name, clock in clocks.items():
            stack.enter_context(patch.object(time, name, clock))
        stack.enter_context(patch.object(os, "urandom", chance.randbytes))
        stack.callback(random.setstate, before)
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        random.seed(chance.random())
        stack.callback(loop.close)
        yield


@contextmanager
def _as_defaults(clocks: Mapping[Any, Callable[[], float]]) -> Iterator[None]:
    """Replace clocks that are default values of the product's parameters: these were evaluated at import, before clocks were patched."""
    before = [(each, each.__defaults__, each.__kwdefaults__) for each in _functions_with_builtins(len(sys.modules))]

    def virtual(default: Any) -> Any:
        return clocks.get(default, default) if isinstance(default, BuiltinFunctionType) else default

    for function, defaults, named in before:
        function.__defaults__ = defaults and tuple(map(virtual, defaults))
        function.__kwdefaults__ = named and {name: virtual(default) for name, default in named.items()}
    try:
        yield
    finally:
        for function, defaults, named in before:
            function.__defaults__, function.__kwdefaults__ = defaults, named


@lru_cache(maxsize=1)
def _functions_with_builtins(num_modules: int) -> list[FunctionType]:
    """Return the product's functions with a built-in function as a default value; search again once more modules are imported."""
    return [
        each
        for each in _functions_of_product()
        if any(
            isinstance(default, BuiltinFunctionType)
            for default in (*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values())
        )
    ]


def _functions_of_product() -> Iterator[FunctionType]:
    modules = [module for name, module in tuple(sys.modules.items()) if name.startswith("pilotlight.")]
    for named in (vars(module) for module in modules):
        for each in tuple(named.values()):
            for one in (each, *vars(each).values()) if isinstance(each, type) else (each,):
                if isinstance(one, FunctionType) and (one.__defaults__ or one.__kwdefaults__):
                    yield one
