"""`asyncio.run` and `run_until_complete` in code that the function's event loop called.

CPython refuses both while a loop runs in the thread. On the platform they work: its loops are all one, which continues while a call waits.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from workers import host


def allow() -> None:
    """Let nested calls wait on the function's loop.
    Loops of other threads, and futures of other loops, stay as they are."""
    run, run_until_complete = asyncio.run, asyncio.BaseEventLoop.run_until_complete

    def nested_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return host.run_sync(main) if host.is_running_here() else run(main, **options)

    def nested_run_until_complete(loop: asyncio.BaseEventLoop, future: Any) -> Any:
        is_foreign = asyncio.isfuture(future) and future.get_loop() is not asyncio._get_running_loop()
        if is_foreign or not host.is_running_here():
            return run_until_complete(loop, future)
        return host.run_sync(future)

    asyncio.run = nested_run
    asyncio.BaseEventLoop.run_until_complete = nested_run_until_complete  # type: ignore[assignment, method-assign]
