"""Liveness is token progress (I5): whether a host that has work takes steps inside its deadline, or, before it has said anything, answers at all."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.protocol import StepOutput


class ProgressWatch:
    def __init__(self, start_timeout_s: float, step_deadline_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._step_deadline_s = step_deadline_s
        self.has_spoken = False  # the present host has sent something
        self._work = 0  # sequences and loads under way
        self._progress_at = 0.0
        self._last_step = -1
        self._idle_since = time.monotonic()

    @property
    def has_work(self) -> bool:
        return self._work > 0

    @property
    def quiet_since(self) -> float | None:
        """Since when the host has answered and had no work: the time at which making a standby costs no request anything."""
        return self._idle_since if self.has_spoken and not self._work else None

    def begin(self) -> None:
        """Watch another host."""
        self.has_spoken, self._last_step = False, -1
        self._idle_since = self._progress_at = time.monotonic()

    def end(self) -> None:
        """Note that the host is gone: it is not asked politely to end, since its process has ended or hangs."""
        self.has_spoken = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Open a scope of work: the host must make progress meanwhile."""
        if self._work == 0:
            self._progress_at = time.monotonic()
        self._work += 1
        try:
            yield
        finally:
            self._work -= 1
            self._idle_since = time.monotonic()

    def note_bytes(self) -> None:
        """Bytes of a load are progress too: large models take longer than a step may."""
        self._progress_at = time.monotonic()

    def note_step(self, step: StepOutput) -> bool:
        """Return whether the host has answered a request: errors are no progress."""
        self.has_spoken = True
        has_answered = any(output.finish_reason not in ("error", "abort") for output in step.outputs)
        if has_answered or step.step != self._last_step:
            self._last_step, self._progress_at = step.step, time.monotonic()
        return has_answered

    def why_stuck(self) -> str | None:
        """Return why the host has to be treated as dead; None while it has not."""
        if not self._work:
            return None
        silent_s = time.monotonic() - self._progress_at
        if not self.has_spoken:
            late = silent_s > self._start_timeout_s
            return f"the engine host did not answer within {self._start_timeout_s:g} s" if late else None
        late = silent_s > self._step_deadline_s
        return f"the engine host has work and took no step for {self._step_deadline_s:g} s" if late else None
