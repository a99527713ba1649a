"""The pauses before the next isolate of a version may start.

An isolate that ends without an answer is replaced at once a few times, then after pauses that double, because a fork, an import and an exit cost
other functions more than any request. An answer resets the count.
"""

PROBATION_S = 10.0  # period after a bad end in which new isolates start with background priority
FREE = 4  # consecutive bad ends that are replaced at once
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
MAX_WAIT_S = 1.0  # longest wait of a request; for a longer pause it gets a 503 with Retry-After


class Restarts:
    def __init__(self) -> None:
        self._num_bad = 0  # consecutive bad ends
        self._ended_at: float | None = None

    def ended_badly(self, now: float, *, had_answered: bool) -> None:
        self._ended_at = now
        self._num_bad = 1 if had_answered else self._num_bad + 1

    def pause_s(self, now: float) -> float:
        """Return the seconds until the next isolate may start; 0 if it may now."""
        beyond = self._num_bad - FREE - 1
        if beyond < 0 or self._ended_at is None:
            return 0.0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond, 16))
        return max(0.0, self._ended_at + pause_s - now)

    def is_on_probation(self, now: float) -> bool:
        return self._ended_at is not None and now - self._ended_at < PROBATION_S
