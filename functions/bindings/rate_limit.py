"""Rate limits: a number of calls per key and period, counted in the memory of this site only.

The window slides: it adds the count of the current period and the share of the previous period's count that is still inside the window. Calls are
assumed to be spread evenly, so after a burst the limit is slightly too loose or too strict. At most 100,000 keys are kept; a forgotten key starts at
zero.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pilotlight.functions.bindings.binding import Binding, BindingError, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.manifest import BindingDeclaration

MAX_KEYS = 100_000  # further keys replace the least recently used
MAX_KEY_BYTES = 2048


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class Window:
    """Counters of one namespace, shared by all functions that bind it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._now_s = now_s
        self._counts: OrderedDict[tuple[str, int], tuple[int, int, int]] = OrderedDict()

    def allows(self, key: str, limit: int, period_s: int) -> bool:
        now_s = self._now_s()
        current = int(now_s // period_s)
        period, before, count = self._counts.pop((key, period_s), (current, 0, 0))
        if current != period:
            before, count = (count if current == period + 1 else 0), 0
        share = 1 - (now_s / period_s - current)
        allowed = before * share + count + 1 <= limit
        self._counts[(key, period_s)] = (current, before, count + allowed)
        if len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)
        return allowed

    async def close(self) -> None:
        self._counts.clear()


class RateLimit(Binding):
    kind = "rate_limit"

    def __init__(self, window: Window, limit: int, period_s: int) -> None:
        self._window = window
        self._limit = limit
        self._period_s = period_s

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "RateLimit":
        options = declaration.options
        if options["period"] not in (10, 60):
            raise BindingError(
                f"{declaration.name}: the period of a rate limit is 10 or 60 seconds, not {options['period']}"
            )
        id = options.get("namespace_id") or f"{services.function}.{declaration.name}"
        window = services.databases.get(directory_of(state_dir, "rate_limit", id), lambda path: Window())
        return cls(window, options["limit"], options["period"])

    @method
    async def limit(self, request: Limit) -> Any:
        if not 1 <= len(request.key.encode()) <= MAX_KEY_BYTES:
            raise BindingError(f"limit: a key has 1 to {MAX_KEY_BYTES} bytes", name="TypeError")
        return {"success": self._window.allows(request.key, self._limit, self._period_s)}
