"""Eviction policy: which models sleep so that another may wake, and when.

It is a pure function of the state of every model. A model's value is the expected cost of its loss: the duration of its wake, divided by the time
until its next use, per byte that it holds. A model that has just woken stays for a while, so that two models cannot evict each other forever. Pinned
models and those with open requests are never candidates.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A model stays awake for at least this multiple of the duration of its wake (up to LONGEST_STAY_S), so that wakes take at most a quarter of the time.
STAYS = 3.0
LONGEST_STAY_S = 60.0
_NO_TIME_S = 1e-6
SPARE = -9  # priority of an extra replica: below all priorities that a site's file can set


class EvictionCandidate(NamedTuple):
    """A model that holds memory."""

    name: str
    num_bytes: int
    is_pinned: bool = False
    is_busy: bool = False  # requests wait for the model or are open on it
    priority: int = 0
    awake_for_s: float = 1e9
    wake_s: float = 1.0  # estimated duration of its next wake
    next_use_s: float = 1e9  # estimated time until its next request

    @property
    def worth(self) -> tuple[int, float]:
        """The cost of losing the model; models are evicted in ascending order of it."""
        per_s = self.wake_s / max(self.next_use_s, _NO_TIME_S)
        return self.priority, per_s / max(1, self.num_bytes)

    @property
    def stays_for_s(self) -> float:
        return max(0.0, min(LONGEST_STAY_S, STAYS * self.wake_s) - self.awake_for_s)


class EvictionPlan(NamedTuple):
    """The models to evict.

    If `is_possible` is False, not enough can be evicted yet: try again when a request ends, or after `wait_s` if it is not None."""

    evict: tuple[str, ...] = ()
    is_possible: bool = True  # enough can be evicted now
    wait_s: float | None = None


def make_room(needed: int, budget: int | None, held: Sequence[EvictionCandidate]) -> EvictionPlan:
    """Plan room for `needed` bytes within `budget`, among the models that hold memory."""
    if budget is None:
        return EvictionPlan()
    missing = sum(candidate.num_bytes for candidate in held) + needed - budget
    if missing <= 0:
        return EvictionPlan()
    idle = [candidate for candidate in held if not (candidate.is_pinned or candidate.is_busy)]
    free_to_go = [candidate for candidate in idle if candidate.stays_for_s == 0.0]
    if (victims := cheapest(missing, free_to_go)) is not None:
        return EvictionPlan(victims)
    waits = [candidate.stays_for_s for candidate in idle if candidate.stays_for_s > 0]
    return EvictionPlan(is_possible=False, wait_s=min(waits) if waits else None)


def cheapest(missing: int, candidates: Iterable[EvictionCandidate]) -> tuple[str, ...] | None:
    """Return the least valuable models that free `missing` bytes; None if all of them free less."""
    chosen: list[EvictionCandidate] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda candidate: (*candidate.worth, candidate.name)):
        if freed >= missing:
            break
        chosen.append(candidate)
        freed += candidate.num_bytes
    if freed < missing:
        return None
    for candidate in reversed(list(chosen)):  # spare the most valuable models whose memory is not needed
        if freed - candidate.num_bytes >= missing:
            chosen.remove(candidate)
            freed -= candidate.num_bytes
    return tuple(candidate.name for candidate in chosen)


def could_ever_fit(needed: int, budget: int | None, held: Sequence[EvictionCandidate]) -> bool:
    """Return whether the model would fit if all models except pinned ones were evicted."""
    return budget is None or needed + sum(candidate.num_bytes for candidate in held if candidate.is_pinned) <= budget


def must_yield(needed: int, budget: int, held: Sequence[EvictionCandidate]) -> tuple[str, ...]:
    """Return the models that must take no new requests.

    When their requests end, a model that has waited long gets their memory.
    """
    missing = sum(candidate.num_bytes for candidate in held) + needed - budget
    return cheapest(missing, [candidate for candidate in held if not candidate.is_pinned]) or ()
