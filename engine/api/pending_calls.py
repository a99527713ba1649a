"""A front end's pending calls, each ended by an event. Does not know how a command is sent."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PendingCalls(Generic[T]):
    """Pending calls of one kind, by the name of their subject. All of it runs in one event loop."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    async def answer(self, name: str, ask: Callable[[], None]) -> T:
        """Send a request and wait for its answer.

        A second call with the same name shares the first one's answer.
        """
        future = self._futures.get(name)
        if future is None:
            future = self._futures[name] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: self._settled(name, done))
            ask()
        return await asyncio.shield(future)

    def resolve(self, name: str, answer: T) -> None:
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.set_result(answer)

    def reject(self, name: str, error: Exception) -> None:
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.set_exception(error)

    def reject_all(self, error: Exception) -> None:
        for name in list(self._futures):
            self.reject(name, error)

    def _settled(self, name: str, future: asyncio.Future[T]) -> None:
        self._futures.pop(name, None)
        if not future.cancelled():
            # the caller may have left, for instance when a site stops: mark the exception as retrieved
            future.exception()
