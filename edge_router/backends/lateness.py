"""The lateness of a site: how much later it answers than this router expected.

It reveals a slow site, and one that publishes wrong figures.

A prediction is an average, so an answer counts as late only above TOLERANCE times it. Observations decay with a half-life: a site that was avoided is
tried again, with one request at a time.

One late answer may be noise, such as a site's first answers after a start or a step that waited for a disk. It makes new conversations go elsewhere.
A conversation whose cache is at the site moves only after two: for it the most delayed answer does not count.
"""

from collections.abc import Callable

TOLERANCE = 1.5  # an answer is late above this multiple of the prediction
HALF_LIFE_S = 20.0
PRIOR_ANSWERS = 3.0  # assumed punctual answers, so that one late answer changes the mean little
LEAST_MS = 20.0  # a smaller mean delay counts as 0


class Lateness:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._late_ms = 0.0  # sum of the answers' excess beyond their tolerance; punctual answers reduce it
        self._latest_ms = 0.0  # the largest delay of an answer
        self._answers = 0.0
        self._at = float("-inf")

    def observe(self, expected_ms: float, actual_ms: float) -> None:
        """Record the expected and the actual time to the first token of an answer."""
        self._forget()
        late_ms = actual_ms - TOLERANCE * expected_ms
        self._late_ms = max(0.0, self._late_ms + late_ms)  # early answers do not offset later delays
        self._latest_ms = max(self._latest_ms, late_ms)
        self._answers += 1

    @property
    def is_punctual(self) -> bool:
        return self._late_ms == 0.0

    def mean_ms(self, overdue_ms: float = 0.0) -> float:
        """Return the mean lateness. `overdue_ms` is the lateness so far of an answer that has not arrived."""
        if self.is_punctual and overdue_ms <= 0:
            return 0.0
        self._forget()
        return self._mean_ms(self._late_ms + max(0.0, overdue_ms), waiting=overdue_ms > 0)

    def proven_ms(self, overdue_ms: float = 0.0, next_overdue_ms: float = 0.0) -> float:
        """Return the mean lateness without the most delayed answer, so that one answer alone proves nothing.
        `overdue_ms` and `next_overdue_ms` are the lateness so far of the two oldest requests without an answer."""
        if self.is_punctual and overdue_ms <= 0:
            return 0.0
        self._forget()
        overdue = [ms for ms in (overdue_ms, next_overdue_ms) if ms > 0]
        late_ms = self._late_ms + sum(overdue) - max([min(self._latest_ms, self._late_ms), *overdue])
        return self._mean_ms(late_ms, waiting=len(overdue))

    def _mean_ms(self, late_ms: float, waiting: int) -> float:
        mean_ms = late_ms / (self._answers + waiting + PRIOR_ANSWERS)
        return mean_ms if mean_ms >= LEAST_MS else 0.0

    def _forget(self) -> None:
        now = self._clock()
        elapsed_s, self._at = now - self._at, now
        if elapsed_s > 0:
            kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._late_ms *= kept
            self._latest_ms *= kept
            self._answers *= kept
