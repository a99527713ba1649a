"""The durations of the phases of recent generations, for the page. They contain no prompts or answers."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from pilotlight.support.logs import REQUEST
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import GenerationTimes
from pilotlight.wire.hop.usage import ResourceUse

KEPT = 500


class RecentGenerations:
    def __init__(self) -> None:
        self.times: deque[GenerationTimes] = deque(maxlen=KEPT)  # oldest first

    @contextmanager
    def timed(self, model: str) -> Iterator["GenerationClock"]:
        """Open the scope of a generation; store its phases when the scope ends."""
        clock = GenerationClock()
        try:
            yield clock
        finally:
            self.times.append(clock.times(model, sys.exception()))


def described(times: GenerationTimes, site: str) -> dict[str, object]:
    """Return a generation in the form in which routers describe requests."""
    first_ms = times.wake_ms + times.admission_ms + times.queue_ms + times.prefill_ms
    outcome = times.outcome if times.outcome not in ("stop", "length", "tool_calls") else "ok"
    return {
        "request_id": times.request_id, "at_s": times.at_s, "account": "", "path": "", "model": times.model, "site": site, "tries": 0, "moves": 0,
        "outcome": outcome, "first_token_ms": first_ms, "took_ms": first_ms + times.decode_ms, "output_tokens": times.output_tokens, "phases": times,
    }  # fmt: skip


class GenerationClock:
    """Times of one generation, in ns of Unix time; 0 for a phase that was not reached."""

    def __init__(self) -> None:
        self._began = time.time_ns()
        self._awake = self._submitted = self._first_output = 0
        self._queue_us = 0
        self._use = ResourceUse()
        self._finish_reason = ""

    def awake(self) -> None:
        self._awake = time.time_ns()

    def submitted(self) -> None:
        self._submitted = time.time_ns()

    def computed(self, use: ResourceUse, finish_reason: str | None, *, first_output_ns: int, queue_us: int) -> None:
        """Record the result and the engine's times."""
        self._use, self._first_output, self._queue_us = use, first_output_ns, queue_us
        self._finish_reason = finish_reason or ""

    def times(self, model: str, error: BaseException | None) -> GenerationTimes:
        ended = time.time_ns()
        awake, submitted, first = self._awake or ended, self._submitted or ended, self._first_output or ended
        started = min(first, submitted + 1000 * self._queue_us)
        phases = (self._began, awake, submitted, started, first, ended)
        wake, admission, queue, prefill, decode = (max(0, later - earlier) / 1e6 for earlier, later in pairwise(phases))
        outcome = self._finish_reason or ("ok" if error is None else "aborted")
        outcome = error.word if isinstance(error, ApiError) else outcome
        use, began_s = self._use, self._began / 1e9
        return GenerationTimes(
            REQUEST.get(), model, began_s, wake, admission, queue, prefill, decode, use.prompt, use.cached, use.output, outcome
        )  # fmt: skip
