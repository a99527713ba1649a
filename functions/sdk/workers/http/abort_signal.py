"""AbortController and AbortSignal: cancel work in this process and at the runtime."""

import asyncio
from collections.abc import Callable
from typing import Any


class AbortError(Exception):
    """The signal that was passed to a call was aborted."""

    name = "AbortError"


class AbortSignal:
    def __init__(self) -> None:
        self.aborted = False
        self.reason: Any = None
        self._listeners: list[Callable[..., Any]] = []

    def add_event_listener(self, event: str, listener: Callable[..., Any], options: Any = None) -> None:
        if event == "abort":
            self._listeners.append(listener)

    def remove_event_listener(self, event: str, listener: Callable[..., Any]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def throw_if_aborted(self) -> None:
        if self.aborted:
            raise _abort_error(self.reason)

    addEventListener, removeEventListener, throwIfAborted = add_event_listener, remove_event_listener, throw_if_aborted

    def _abort(self, reason: Any) -> None:
        if not self.aborted:
            self.aborted, self.reason = True, reason
            for listener in tuple(self._listeners):
                listener()

    @staticmethod
    def timeout(milliseconds: float) -> "AbortSignal":
        signal = AbortSignal()
        asyncio.get_running_loop().call_later(milliseconds / 1e3, signal._abort, f"{milliseconds:g} ms have passed")
        return signal


class AbortController:
    def __init__(self) -> None:
        self.signal = AbortSignal()

    @classmethod
    def new(cls) -> "AbortController":
        return cls()

    def abort(self, reason: Any = None) -> None:
        self.signal._abort(reason)


class AbortedStream:
    """A stream that raises AbortError once its signal is aborted."""

    def __init__(self, body: Any, signal: Any) -> None:
        self._body = body
        self._signal = signal

    def __aiter__(self) -> "AbortedStream":
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk: bytes = await until_aborted(self._body.__anext__(), self._signal)
            return chunk
        except AbortError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        await self._body.aclose()


async def until_aborted(work: Any, signal: Any) -> Any:
    """Return the result of `work`. An abort cancels it here and at the runtime. Raises AbortError."""
    if signal.aborted:
        work.close()
        raise _abort_error(getattr(signal, "reason", None))
    aborted = asyncio.get_running_loop().create_future()

    def abort(*_: Any) -> None:
        if not aborted.done():
            aborted.set_result(None)

    signal.add_event_listener("abort", abort)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _abort_error(getattr(signal, "reason", None))
    finally:
        signal.remove_event_listener("abort", abort)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _abort_error(reason: Any) -> Exception:
    return (
        reason if isinstance(reason, Exception) else AbortError(f"the call was aborted: {reason or 'no reason given'}")
    )
