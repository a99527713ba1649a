"""EngineClient: the front end's view of an engine host, over a socket or in the same process.

Knows how to pair a submitted sequence with its outputs and how to free it when its reader leaves; refuses to know HTTP, text and torch.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from engine.protocol import ErrorCode, ModelInfo, ModelLoad, ModelSpec, StepOutput, Submit, TokenOutput

ProgressCallback = Callable[[int, int], None]  # (bytes done, bytes in total)


class EngineError(Exception):
    """The engine refused or lost a request. `code` is a word of the protocol; `str()` is a sentence for the user."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class EngineClient(Protocol):
    """One engine host. Both implementations keep the same promises:

    - `generate` opens a scope around one sequence. Iterating yields its outputs in order and ends after the one with a finish reason; a finish
      reason "error" is raised as EngineError instead. Leaving the scope early, for whatever reason, aborts the sequence.
    - when the host dies, every open iteration raises EngineError("engine_error"), and later calls do so at once.
    """

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """The newest load of every model, by name."""

    @property
    def last_event_at(self) -> float:
        """time.monotonic() of the newest frame from the host: liveness is progress."""

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        """Call back once per frame (for metrics)."""

    async def load_model(self, spec: ModelSpec, on_progress: ProgressCallback | None = None) -> ModelInfo: ...

    async def unload_model(self, name: str) -> None: ...

    def generate(self, submit: Submit) -> AbstractAsyncContextManager[AsyncIterator[TokenOutput]]: ...

    def fail(self, message: str) -> None:
        """The host is known to be dead: end every open call with EngineError("engine_error")."""

    async def close(self) -> None: ...
