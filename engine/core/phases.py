"""A timer for the phases of a load, which make up the timeline of a cold start."""

import time


class Phases:
    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._spent: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Add the time since the last call, or the start, to phase `name`, which may occur several times."""
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def spent(self) -> tuple[tuple[str, float], ...]:
        """Return (name, seconds) of each phase; their sum is the time from the start to the last `end`."""
        return tuple(self._spent.items())

    @property
    def total_s(self) -> float:
        return self._last - self._began
