"""What waits for memory, or to be taken, looks again: a request has ended, or a model, on whichever device.

Unlike asyncio's own, it has no lock: all of it happens in one event loop.
"""

import asyncio


class Condition:
    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()
