"""A clock that moves only when a test moves it."""


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now
