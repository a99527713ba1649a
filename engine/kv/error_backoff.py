"""When something that fails is tried again: after a few errors in a row there are pauses, longer after each try that fails.

Says in the log that it stops and that it works again. Refuses to know what failed.
"""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_PATIENCE = 3  # errors in a row, after which it is given up for:
_FIRST_PAUSE_S = 10.0  # doubled after each try that fails, up to:
_LONGEST_PAUSE_S = 300.0


class ErrorBackoff:
    def __init__(self, what: str, verb: str, clock: Callable[[], float]) -> None:
        """`what` may no longer be `verb`: "the disk KV tier at /kv", "written to"."""
        self._what = what
        self._verb = verb
        self._clock = clock
        self.num_errors = 0
        self._failures = 0  # in a row
        self._next_try_at = 0.0

    @property
    def is_exhausted(self) -> bool:
        return self.is_trying and self._clock() < self._next_try_at

    @property
    def is_trying(self) -> bool:
        """Tell whether the next call is a try: it is not known to work."""
        return self._failures >= _PATIENCE

    def succeed(self) -> None:
        if self.is_trying:
            log.warning("%s is %s again", self._what, self._verb)
        self._failures = 0

    def fail(self, error: str) -> None:
        self.num_errors += 1
        self._failures += 1
        if not self.is_trying:
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(10, self._failures - _PATIENCE))
        self._next_try_at = self._clock() + pause_s
        if self._failures == _PATIENCE:
            log.error(
                "%s is no longer %s after %d errors in a row, the last of them: %s; it is tried again from time to time",
                self._what, self._verb, _PATIENCE, error,
            )  # fmt: skip
