"""Restarts: when the next isolate of a version may start.

One that ended without an answer is replaced at once a few times, then after pauses that double: a fork, an import and a death cost neighbours more
than any request. An answer resets the count.
"""

PROBATION_S = 10.0  # after an isolate that ended badly, the next ones start in the background class
FREE = 4  # bad ends in a row that are replaced at once
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
MAX_WAIT_S = 1.0  # the longest time that a request waits; for a longer pause it gets Retry-After


class Restarts:
    def __init__(self) -> None:
        self._num_bad = 0  # in a row
        self._ended_at: float | None = None

    def ended_badly(self, now: float, *, had_answered: bool) -> None:
        self._ended_at = now
        self._num_bad = 1 if had_answered else self._num_bad + 1

    def pause_s(self, now: float) -> float:
        """Seconds until the next may start; 0: it may."""
        beyond = self._num_bad - FREE - 1
        if beyond < 0 or self._ended_at is None:
            return 0.0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond, 16))
        return max(0.0, self._ended_at + pause_s - now)

    def is_on_probation(self, now: float) -> bool:
        return self._ended_at is not None and now - self._ended_at < PROBATION_S
