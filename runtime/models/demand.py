"""The demand for a model: requests in progress, waiting and expected, and the length of its answers.

Pure arithmetic over given times, in seconds of Unix time. Independent of how the result is used.
"""

HOUR_S = 3600.0
GAP_WEIGHT = 0.2  # weight of the newest gap in the moving average
DAY_WEIGHT = 0.25  # weight of the newest day in the moving average of each hour of the day
REGULAR_GAPS = 4  # number of gaps after which a rhythm is recognized
REGULARITY = 0.25  # gaps are a rhythm if they deviate from their average by less than this share of it
NEVER_S = 1e9
FIRST_ANSWER = 256.0  # assumed output tokens of an answer before any has ended
ANSWER_WEIGHT = 0.05  # weight of the newest answer in the moving average
_SHORTEST_S = 1e-3


class Demand:
    def __init__(self) -> None:
        self.users = 0  # requests that use the model
        self.waiters = 0  # requests that start as soon as the model is awake
        self.queued = 0  # requests that wait until the model is awake and accepts requests again
        self.used_at = 0.0
        self.arrivals = Arrivals()
        self.answer_tokens = FIRST_ANSWER  # average output tokens of an answer

    def answered(self, tokens: int) -> None:
        """Record the output tokens of a completed answer."""
        self.answer_tokens += ANSWER_WEIGHT * (tokens - self.answer_tokens)

    @property
    def is_open(self) -> bool:
        return self.users > 0 or self.waiters > 0


class Arrivals:
    """Predicts the next request from the latest gaps, and from the hours of the day with requests."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap = 0.0  # moving average of gaps in seconds
        self._deviation = 0.0  # moving average of the gaps' absolute deviation
        self._gaps = 0
        self._by_hour = [0.0] * 24  # average number of requests in each hour of the day
        self._days = [0] * 24  # number of complete observations of each hour
        self._hour: int | None = None  # the current hour, in hours of Unix time
        self._count = 0

    def note(self, now_s: float) -> None:
        """Record a request."""
        self._roll(now_s)
        self._count += 1
        if self._last is not None:
            gap = max(0.0, now_s - self._last)
            self._gaps += 1
            if self._gaps == 1:
                self._gap = self._deviation = gap  # a single gap is not a rhythm
            else:
                self._deviation += GAP_WEIGHT * (abs(gap - self._gap) - self._deviation)
                self._gap += GAP_WEIGHT * (gap - self._gap)
        self._last = now_s

    def expected_in_s(self, now_s: float) -> float:
        """Return the expected seconds until the next request.

        The estimate grows after a silence that is longer than the usual gap."""
        self._roll(now_s)
        if self._last is None:
            return NEVER_S
        silence = max(0.0, now_s - self._last)
        by_gaps = max(self._gap if self._gaps else HOUR_S, silence, _SHORTEST_S)
        return min(by_gaps, self._expected_by_hour_s(now_s))

    def is_due(self, now_s: float, lead_s: float) -> bool:
        """Return whether a request is likely within `lead_s`.
        It is if the gaps predict one, or if an hour begins that usually has requests."""
        self._roll(now_s)
        if self._last is None:
            return False
        if self._gaps >= REGULAR_GAPS and self._deviation < REGULARITY * self._gap:
            next_s = self._last + self._gap
            if abs(now_s - next_s) <= lead_s + self._deviation:
                return True
        begins_soon = int((now_s + lead_s) // HOUR_S) > int(now_s // HOUR_S)
        return begins_soon and self._expected_by_hour_s(now_s + lead_s) <= HOUR_S

    def _expected_by_hour_s(self, now_s: float) -> float:
        """Return the average gap between requests in this hour of earlier days."""
        hour = int(now_s // HOUR_S) % 24
        if not self._days[hour] or self._by_hour[hour] <= 0:
            return NEVER_S
        return HOUR_S / self._by_hour[hour]

    def _roll(self, now_s: float) -> None:
        """Add the hours that have ended to their averages."""
        hour = int(now_s // HOUR_S)
        if self._hour is None:
            self._hour = hour
        if hour - self._hour > 24 * 30:  # averages do not change any more after a month
            self._hour = hour - 24 * 30
        while self._hour < hour:
            of_day = self._hour % 24
            self._days[of_day] += 1
            weight = max(DAY_WEIGHT, 1 / self._days[of_day])
            self._by_hour[of_day] += weight * (self._count - self._by_hour[of_day])
            self._count = 0
            self._hour += 1
