"""What was done for a request before its task began, and who answers for it then.

A request that is whole when it comes is admitted, looked at and sent to a site where its bytes come in; its task, which tells and waits, starts
when that is done. Use as `with` in the task: what it did not take over is given back.
"""

from contextlib import AbstractContextManager
from types import TracebackType

from edge_router.exchange import Exchange


class Ahead:
    def __init__(self) -> None:
        self.error: Exception | None = None  # why it went no further
        self.body: bytes | None = None
        self.exchange: Exchange | None = None
        self._held: AbstractContextManager[None] | None = None

    def enter(self, held: AbstractContextManager[None]) -> None:
        """It is left when the request has been answered."""
        held.__enter__()
        self._held = held

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.exchange is not None and (asked := self.exchange.take_asked()) is not None:
            asked.give_up()
        if self._held is not None:
            self._held.__exit__(kind, error, tb)
