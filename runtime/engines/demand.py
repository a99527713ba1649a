"""How much a model is wanted: by requests that have it, by those that wait for it, and by those that are expected."""

from runtime.engines.arrivals import Arrivals


class Demand:
    def __init__(self) -> None:
        self.users = 0  # requests that have the model
        self.waiters = 0  # requests that have it as soon as it is awake
        self.queued = 0  # these, and those that it does not take yet because it yields
        self.used_at = 0.0
        self.arrivals = Arrivals()

    @property
    def is_open(self) -> bool:
        return self.users > 0 or self.waiters > 0
