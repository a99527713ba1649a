"""The clock of bindings, set by a test."""

from pilotlight.functions.bindings.binding import Clock


class SetClock(Clock):
    look_s = 0.005

    def __init__(self, now: float) -> None:
        self.now = now
        self.num_reads = 0

    def now_s(self) -> float:
        self.num_reads += 1
        return self.now
