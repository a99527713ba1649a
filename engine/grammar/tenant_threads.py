"""A few threads that tenants share. A tenant uses one thread at most.

A piece of work waits for its tenant's earlier work and for one piece of each other tenant. This module decides whose turn it is, whatever the work
is.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_Work = tuple["Future[Any]", Callable[[], Any]]


class TenantThreads:
    def __init__(self, size: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(size, name)
        # by tenant: work that waits until the tenant's current piece has ended
        self._waiting: dict[bytes, deque[_Work]] = {}
        self._lock = threading.Lock()

    def submit(self, tenant: bytes, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._lock:
            if (waiting := self._waiting.get(tenant)) is not None:
                waiting.append((future, work))
                return future
            self._waiting[tenant] = deque()
        self._threads.submit(self._run, tenant, (future, work))
        return future

    def close(self) -> None:
        """Drop the work that has not started, without waiting for the rest."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, tenant: bytes, work: _Work) -> None:
        future, function = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the future's result is read
                future.set_exception(error)
        with self._lock:
            if not (waiting := self._waiting[tenant]):
                del self._waiting[tenant]
                return
            following = waiting.popleft()
        with suppress(RuntimeError):  # `close` was called meanwhile
            self._threads.submit(self._run, tenant, following)
