"""The durations of the phases of recent generations, for the page. They contain no prompts or answers."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from pilotlight.support.logs import REQUEST
from pilotlight.wire.chat import FinishReason
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
        self.began_ns = time.time_ns()
        self.awake_ns = self.submitted_ns = self.first_output_ns = 0
        self.queue_us = 0  # time that the first sequence has waited in the engine
        self.use = ResourceUse()
        self.finish_reason: FinishReason | None = None

    def awake(self) -> None:
        self.awake_ns = time.time_ns()

    def submitted(self) -> None:
        """Record that the engine has the generation now."""
        self.submitted_ns = time.time_ns()

    def computed(
        self, use: ResourceUse, finish_reason: FinishReason | None, *, first_output_ns: int, queue_us: int
    ) -> None:
        """Record the result and the engine's times."""
        self.use, self.first_output_ns, self.queue_us = use, first_output_ns, queue_us
        self.finish_reason = finish_reason

    def engine_phases(self, ended_ns: int) -> tuple[int, int, int]:
        """Return when the engine got the generation, took its first step for it, and had its first token."""
        submitted, first = self.submitted_ns or ended_ns, self.first_output_ns or ended_ns
        return submitted, min(first, submitted + 1000 * self.queue_us), first

    def times(self, model: str, error: BaseException | None) -> GenerationTimes:
        ended = time.time_ns()
        phases = (self.began_ns, self.awake_ns or ended, *self.engine_phases(ended), ended)
        wake, admission, queue, prefill, decode = (max(0, later - earlier) / 1e6 for earlier, later in pairwise(phases))
        outcome: str = self.finish_reason or ("ok" if error is None else "aborted")
        outcome = error.word if isinstance(error, ApiError) else outcome
        use, began_s = self.use, self.began_ns / 1e9
        return GenerationTimes(
            REQUEST.get(), model, began_s, wake, admission, queue, prefill, decode, use.prompt, use.cached, use.output, outcome
        )  # fmt: skip
