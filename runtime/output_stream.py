"""The outputs of a request's sequences as they come, collected while the last ones are being sent.

A slow reader costs fewer, larger events. Knows the scopes of its sequences and closes one early when asked; refuses to know text.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from engine.client import EngineError
from engine.protocol import Submit, TokenOutput
from runtime.engines.continuation import Continuations

Numbered = tuple[int, TokenOutput]  # which sequence, by the number it was submitted under, and its output


class OutputStream:
    """A queue of the outputs of several sequences."""

    def __init__(self) -> None:
        self._ready: deque[Numbered] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._scopes: dict[int, AsyncExitStack] = {}

    async def take(self) -> list[Numbered]:
        """Take what is ready, at least one output. Raises the first error of any sequence once everything before it has been taken."""
        await self._news.wait()
        self._news.clear()
        if not self._ready:
            assert self._error is not None, "news without outputs is an error"
            raise self._error
        taken = list(self._ready)
        self._ready.clear()
        if self._error is not None:
            self._news.set()
        return taken

    async def close(self, number: int) -> None:
        """Leave one sequence's scope, which aborts it unless it has ended."""
        await self._scopes[number].aclose()

    async def open(self, engine: Continuations, number: int, submit: Submit) -> AsyncExitStack:
        """Begin to collect a sequence's outputs; leaving the stack ends that."""
        scope = self._scopes[number] = AsyncExitStack()
        outputs = await scope.enter_async_context(engine.generate(submit))
        await scope.enter_async_context(_running(self._collect(number, outputs)))
        return scope

    async def _collect(self, number: int, outputs: AsyncIterator[TokenOutput]) -> None:
        is_ended = False
        try:
            async for output in outputs:
                if self._error is None:  # else this output came after what ends the request
                    self._ready.append((number, output))
                    self._news.set()
                is_ended = output.finish_reason is not None
            if not is_ended:
                raise EngineError("engine_error", "the engine ended the answer without a finish reason")
        except Exception as error:  # whatever it is, the request must hear of it rather than wait
            self._error = self._error or error
            self._news.set()


@asynccontextmanager
async def output_stream(engine: Continuations, submits: Mapping[int, Submit]) -> AsyncIterator[OutputStream]:
    """Submit sequences in order, and collect until the scope is left; then every sequence that has not ended is aborted."""
    outputs = OutputStream()
    async with AsyncExitStack() as scopes:
        for number, submit in submits.items():
            scopes.push_async_exit(await outputs.open(engine, number, submit))
        yield outputs


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name="outputs")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
