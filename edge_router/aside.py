"""Work on large bodies beside the event loop, in one thread for all: of several, each would keep the loop waiting for a turn of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

AT_ONCE_BYTES = 256 << 10  # a body up to here is read in a few milliseconds, on the loop

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_thread = ThreadPoolExecutor(1, "large bodies")


async def aside_if_large(body: bytes, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    if len(body) <= AT_ONCE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: work(*args))
