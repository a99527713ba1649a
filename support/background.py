"""Run background tasks for the lifetime of a process or of one of its parts.

The error of a plain asyncio task stays unnoticed until its process ends, while its work (time limits, the ledger, the page) has stopped. Here the
error is logged with its traceback, and the task starts again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

RESTART_AFTER_S = 1.0  # pause before work starts again: a repeated error gives one traceback a second

Item = TypeVar("Item")
Work = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger("pilotlight.background")


def start(work: Work, name: str, restart_after_s: float = RESTART_AFTER_S) -> asyncio.Task[None]:
    """Run `work` in a task, and again whenever it raises.

    The task ends when `work` returns or the task is cancelled. Keep a reference to it, because the event loop does not. `name` is for the log, such
    as "the usage ledger".
    """
    return asyncio.create_task(_repeat(work, name, restart_after_s), name=name)


@asynccontextmanager
async def running(work: Work, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Open a scope in which `work` runs as in `start`."""
    task = start(work, name)
    try:
        yield task
    finally:
        await stop(task)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended. Their errors are discarded."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)  # unlike gather, it does not cancel them once more if this task is cancelled
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def run_all(items: Sequence[Item], work: Callable[[Item], Awaitable[None]], at_once: int) -> None:
    """Await `work` for all items, `at_once` of them at a time. Of several errors the first is raised."""

    async def run(rest: Iterator[Item]) -> None:
        for item in rest:
            await work(item)

    rest = iter(items)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items))):
                group.create_task(run(rest))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


def for_each(items: Iterable[Item], work: Callable[[Item], None], name: str) -> None:
    """Call `work` for each item. An exception is logged, and the next items follow."""
    for item in items:
        try:
            work(item)
        except Exception:
            log.exception("%s failed for %.200r; the others continue", name, item)


async def _repeat(work: Work, name: str, restart_after_s: float) -> None:
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed and starts again in %g s", name, restart_after_s)
        await asyncio.sleep(restart_after_s)
