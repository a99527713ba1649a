"""How many further tries the router may make: a share of what clients lately asked for, so that a network in trouble is not asked many times as much.

A bucket that every request fills a little and every further try empties by one. A floor keeps a quiet router able to retry. Being declined is no
failure and is not paid for; continuing a stream is promised and is not either.
"""

from collections.abc import Callable

SHARE = (
    0.2  # further tries for each request: when every site fails, the network gets 1.2 times its traffic and not 3 times
)
FLOOR_PER_S = 5.0  # what fills the bucket besides: three sites' tries of a client that is alone
MOST = 100.0  # tries that a quiet time may have saved up


class RetryBudget:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries = MOST / 2
        self._filled_at = clock()

    @property
    def left(self) -> float:
        self._fill()
        return self._tries

    def deposit(self) -> None:
        """A request came."""
        self._tries = min(MOST, self._tries + SHARE)

    def withdraw(self) -> bool:
        """Whether one more try may be made, which is then paid for."""
        self._fill()
        if self._tries < 1:
            return False
        self._tries -= 1
        return True

    def _fill(self) -> None:
        now = self._clock()
        self._tries = min(MOST, self._tries + FLOOR_PER_S * max(0.0, now - self._filled_at))
        self._filled_at = now
