"""Split a stream in two.

One task reads the stream for both branches: a reader that is cancelled does not end it for the other one, and an error of the stream reaches both.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator


class Tee:
    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self.branches = TeeBranch(self), TeeBranch(self)
        self.end: Exception | None = None  # StopAsyncIteration, or the stream's error
        self._stream = stream
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Read the next chunk for both branches."""
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())

    async def closed(self) -> None:
        """Close the stream if both branches are closed."""
        if all(branch.is_closed for branch in self.branches):
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            if (aclose := getattr(self._stream, "aclose", None)) is not None:
                await aclose()

    async def _read(self) -> None:
        while self.end is None:
            await self._wanted.wait()
            self._wanted.clear()
            chunk = b""
            try:
                chunk = await anext(self._stream)
            except Exception as error:
                self.end = error
            for branch in self.branches:
                branch.push(chunk)


class TeeBranch:
    """An async iterator for one reader.
    Chunks that the other reader has taken stay in memory until this one takes them or is closed."""

    def __init__(self, tee: Tee) -> None:
        self.is_closed = False
        self._tee = tee
        self._chunks: deque[bytes] = deque()
        self._news = asyncio.Event()

    def push(self, chunk: bytes) -> None:
        if chunk and not self.is_closed:
            self._chunks.append(chunk)
        self._news.set()

    def __aiter__(self) -> "TeeBranch":
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self.is_closed:
                raise StopAsyncIteration
            if self._tee.end is not None:
                raise self._tee.end
            self._news.clear()
            self._tee.want()
            await self._news.wait()
        return self._chunks.popleft()

    async def aclose(self) -> None:
        self.is_closed = True
        self._chunks.clear()
        self._news.set()
        await self._tee.closed()
