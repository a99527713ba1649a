"""What a load's time goes into, one phase after another: the raw material of a cold start's timeline."""

import time


class Phases:
    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._spent: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Count the time since the last end, or the beginning, as that of `name`. A name may come again."""
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def spent(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds), in order; their sum is the time from the beginning to the last end."""
        return tuple(self._spent.items())

    @property
    def total_s(self) -> float:
        return self._last - self._began
