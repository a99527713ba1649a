"""Exponential backoff for a failing resource, which starts after a few consecutive errors.

Logs when the resource is no longer used and when it works again. This module is independent of the kind of resource.
"""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_PATIENCE = 3  # consecutive errors before the first pause
_FIRST_PAUSE_S = 10.0  # pause before the first try; doubled after each failed try, up to the longest pause
_LONGEST_PAUSE_S = 300.0


class ErrorBackoff:
    def __init__(self, what: str, verb: str, clock: Callable[[], float]) -> None:
        """Make a backoff. `what`, `verb`: for its log, such as "the disk KV tier at /kv" and "written to"."""
        self._what = what
        self._verb = verb
        self._clock = clock
        self.num_errors = 0
        self._failures = 0  # consecutive errors
        self._next_try_at = 0.0

    @property
    def is_exhausted(self) -> bool:
        return self.is_trying and self._clock() < self._next_try_at

    @property
    def is_trying(self) -> bool:
        """True if the resource has failed so often in a row that its next use is only a try."""
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
                "%s is no longer %s after %d consecutive errors; the last error: %s; retrying after a pause",
                self._what, self._verb, _PATIENCE, error,
            )  # fmt: skip
