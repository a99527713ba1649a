"""A condition variable for one event loop: tasks that wait for something to change look again at each notice. Unlike asyncio's own it has no lock."""

import asyncio


class Condition:
    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()
