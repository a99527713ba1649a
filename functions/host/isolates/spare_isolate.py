"""A spare isolate: forked before a request needs it.

It imports the function's module when a request takes it. That request waits neither for the fork nor for the setup at both ends. A version has at
most one, only while the memory for idle processes has room (zygotes/zygote_budget.py), and not longer than its zygote.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.isolates.isolate_handle import IsolateHandle
from pilotlight.functions.host.zygotes.pool_zygote import PoolZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import FunctionZygote, ZygoteError

AFTER_S = 0.5  # pause after a request has started an isolate: a fork uses 3 ms of a core, which that request may need


class SpareFactory(Protocol):
    """The part of isolate_factory.py that makes a spare isolate."""

    zygote: PoolZygote

    def new(self, on_fault: Callable[[IsolateHandle, Fault], None], /, *, is_on_probation: bool) -> IsolateHandle: ...

    async def start(self, isolate: IsolateHandle, /, *, is_on_probation: bool) -> None: ...


class SpareIsolate:
    def __init__(self, factory: SpareFactory, on_fault: Callable[[IsolateHandle, Fault], None]) -> None:
        self._factory = factory
        self._on_fault = on_fault
        self._isolate: IsolateHandle | None = None
        self._asked_at = float("-inf")
        self._failed: FunctionZygote | None = None  # the zygote whose spare isolate ended by itself: it gets no other

    @property
    def exists(self) -> bool:
        return self._isolate is not None

    def is_wanted(self, now: float) -> bool:
        """Return True if no spare exists and the zygote can fork one."""
        zygote = self._factory.zygote.current
        if self._isolate is not None or zygote is None or zygote is self._failed:
            return False
        return zygote.can_fork and now - self._asked_at > AFTER_S

    async def run(self) -> None:
        """Start one; close it if it ends before it is taken."""
        zygote = self._factory.zygote.current
        isolate = self._isolate = self._factory.new(self._on_fault, is_on_probation=False)
        with suppress(ZygoteError, OSError):  # the request that has to start one gets the error
            await self._factory.start(isolate, is_on_probation=False)
            if self._isolate is not isolate:  # it was closed meanwhile
                return await isolate.close()
            await isolate.until_gone()
        if self._isolate is isolate:
            self._isolate = None
            self._failed = zygote if zygote is not None and zygote.is_alive else None
            await isolate.close()

    def take(self, now: float) -> IsolateHandle | None:
        """Return the isolate, which then belongs to the caller; None if there is none that works."""
        self._asked_at = now
        isolate = self._isolate
        if isolate is None or not (isolate.is_usable and isolate.process.is_running):
            return None
        self._isolate = None
        return isolate

    def watch(self) -> None:
        """Check its usage: a package may run code in each fork."""
        if self._isolate is not None:
            self._isolate.watch_idle()

    async def close(self) -> None:
        isolate, self._isolate = self._isolate, None
        if isolate is not None:
            await isolate.close()
