"""Estimates for prompts that one host computes for another.

Engine planning, sites, routers and simulations share them. `exposed_s` is the time that moving a prompt's KV blocks adds, `PredictionError` the share
by which results took longer than predicted.
"""

import math
import time
from collections.abc import Callable

# Most tokens in the last chunk of a prompt that is handed over. It is short, because the transfer of its blocks does not overlap with computation.
LAST_CHUNK_TOKENS = 512
HAND_OVER_S = 0.02  # fixed cost of a hand-over: handshake, second sequence, copy of the last blocks
# Error of a prediction, as a share of it: the least and first, the most, the weight of the newest one, and the seconds in which it falls by half. It
# falls so that a place that was busy is tried again.
FIRST_ERROR, MOST_ERROR, ERROR_WEIGHT, ERROR_HALVES_S = 0.25, 8.0, 0.3, 300.0


def exposed_s(num_tokens: int, tokens_per_s: float, compute_s: float) -> float:
    """Return the seconds by which the transfer of a prompt's blocks outlasts their computation.

    Blocks are moved while later blocks are computed, so at least the last chunk's blocks remain. A `tokens_per_s` of 0 means that the path is not
    measured yet: it counts as free, so that it is tried.
    """
    if not tokens_per_s:
        return 0.0
    last_tokens = min(num_tokens, LAST_CHUNK_TOKENS)
    return max(last_tokens / tokens_per_s, num_tokens / tokens_per_s - compute_s)


class PredictionError:
    """The share by which results took longer than predicted.

    It is a moving average that falls with time to FIRST_ERROR."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._error, self._noted_at = FIRST_ERROR, clock()

    @property
    def share(self) -> float:
        age = self._clock() - self._noted_at
        return FIRST_ERROR + (self._error - FIRST_ERROR) * math.exp2(-age / ERROR_HALVES_S)

    def note(self, overrun: float) -> None:
        """Record a result; `overrun` is its time divided by the predicted one."""
        error = min(MOST_ERROR, max(FIRST_ERROR, overrun - 1))
        self._error, self._noted_at = self.share + ERROR_WEIGHT * (error - self.share), self._clock()
