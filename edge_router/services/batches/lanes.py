"""Turns of waiting requests: owners in turn, while the sites of a model have idle capacity.

A site has idle capacity if nothing waits there and few requests are in progress, so interactive requests come first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from pilotlight.edge_router.backends.backend import Backend

IDLE_BELOW = 8  # requests in progress at a site, from all owners


class Lane:
    """One owner's waiting requests for one model."""

    def __init__(self, owner: str, model: str) -> None:
        self.owner = owner
        self.model = model
        self.last = 0  # the number of the last request that was started
        self.turn = 0  # number of the turn in which it was started
        self.num_open = 0
        self.is_empty = False


class Lanes:
    """The lanes with waiting or open requests."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._all: dict[tuple[str, str], Lane] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, owner: str, models: Iterable[str]) -> None:
        """Note that an owner has waiting requests for these models."""
        for model in models:
            self._all.setdefault((owner, model), Lane(owner, model)).is_empty = False

    def begin(self, lane: Lane, number: int) -> None:
        """Start a request of the lane."""
        self._num_turns += 1
        lane.last, lane.turn, lane.num_open = number, self._num_turns, lane.num_open + 1

    def end(self, lane: Lane) -> None:
        """End a request of the lane."""
        lane.num_open -= 1
        self._forget(lane)

    def exhaust(self, lane: Lane) -> None:
        """Note that no request of the lane waits."""
        lane.is_empty = True
        self._forget(lane)

    def next(self) -> Lane | None:
        """Return the lane whose owner was served the longest ago, among models with capacity."""
        turns, num_open = Counter[str](), Counter[str]()
        for lane in self._all.values():
            turns[lane.owner] = max(turns[lane.owner], lane.turn)
            num_open[lane.model] += lane.num_open
        has_room = {model: self._has_room(model, number) for model, number in num_open.items()}
        lanes = [lane for lane in self._all.values() if not lane.is_empty and has_room[lane.model]]
        return min(lanes, key=lambda lane: (turns[lane.owner], lane.turn), default=None)

    def _has_room(self, model: str, num_open: int) -> bool:
        """Tell whether a request for the model may start, when `num_open` are in progress."""
        sites = [each for each in self._backends.values() if each.state == "healthy"]
        serving = [each for each in sites if each.view().model(model) is not None] or sites
        return num_open < IDLE_BELOW * len(serving) and any(map(is_idle, serving))

    def _forget(self, lane: Lane) -> None:
        if lane.is_empty and not lane.num_open:
            self._all.pop((lane.owner, lane.model), None)


def is_idle(backend: Backend) -> bool:
    status = backend.status
    if status is None or any(model.waiting or model.queued_tokens for model in status.models):
        return False
    return max(status.inflight, backend.outstanding) < IDLE_BELOW
