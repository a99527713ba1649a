"""Division of a step's prompt tokens among tenants with prompts in progress and those that wait.

Weighted fair queueing (Demers, Keshav and Shenker, 1989), on two levels. Between priorities, all but the most urgent weigh 1 / AGEING_ADMISSIONS: the
most urgent prompts get nearly all, and none starves. Between the tenants of a priority all weigh the same, and those without a prompt in progress
count as one. Surpluses are remembered, so that shares are right over several steps even if one step has fewer tokens than there are tenants; absent
tenants save up nothing. This module is independent of sequences, blocks and admission.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from pilotlight.engine.scheduling.fairness import AGEING_ADMISSIONS

_PARTS = 16  # number of parts in which a step's tokens are distributed
_REMEMBERED = 64  # limit of remembered tenants without a prompt in progress; each has a surplus of less than a part

Key = TypeVar("Key", bound=Hashable)
Owner = tuple[int, bytes]  # priority and tenant


class PromptShares:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._priorities: _FairShares[int] = _FairShares()
        # The shares of tenants, by priority; the key None holds those of all tenants without a prompt in progress.
        self._tenants: dict[int, _FairShares[bytes | None]] = {}

    def divide(self, budget: int, wanted: Mapping[Owner, int], waiting: Collection[int] = ()) -> Counter[Owner]:
        """Return how many of the `budget` tokens each owner gets for its prompts.

        `wanted`: tokens that each owner's prompts need, the owner of the oldest prompt first. `waiting`: priorities in which tenants without a prompt
        in progress wait; their share is left over.
        """
        wants: dict[int, dict[bytes | None, int]] = {priority: {None: budget} for priority in waiting}
        for (priority, name), tokens in wanted.items():
            wants.setdefault(priority, {})[name] = tokens
        part = max(self._block_size, budget // _PARTS)
        shares: Counter[Owner] = Counter()
        self._priorities.begin(wants)
        for priority, tenants in wants.items():
            self._tenants.setdefault(priority, _FairShares()).begin(tenants)
        while budget and wants:
            most_urgent = min(wants)
            weights = {
                priority: 1.0 if priority == most_urgent else 1 / AGEING_ADMISSIONS for priority in sorted(wants)
            }
            priority = self._priorities.next_of(weights)
            left = wants[priority]
            tenant = self._tenants[priority].next_of(left)
            tokens = min(part, budget, left[tenant])
            self._priorities.serve(priority, tokens, weights[priority], sum(weights.values()))
            self._tenants[priority].serve(tenant, tokens, 1.0, len(left))
            budget -= tokens
            left[tenant] -= tokens
            if tenant is not None:
                shares[priority, tenant] += tokens
            if not left[tenant]:
                del left[tenant]
            if not left:
                del wants[priority]
        return shares

    def charge(self, owner: Owner, tokens: int) -> None:
        """Record tokens that an owner got beyond its share."""
        priority, tenant = owner
        if tokens:
            self._tenants.setdefault(priority, _FairShares()).charge(tenant, tokens)


class _FairShares(Generic[Key]):
    """Chooses the key to serve next, so that active keys get service in proportion to their weights."""

    def __init__(self) -> None:
        self._now = 0.0  # the service that an always active key of weight 1 would have had
        # The service of each key divided by its weight; it is raised to `_now` when the key becomes active.
        self._had: dict[Key, float] = {}
        self._wanting: set[Key] = set()

    def begin(self, keys: Iterable[Key]) -> None:
        """Set the active keys."""
        wanting = set(keys)
        for key in wanting - self._wanting:
            self._had[key] = max(self._now, self._had.get(key, 0.0))
        self._wanting = wanting
        if len(self._had) > len(wanting) + _REMEMBERED:
            self._had = {key: had for key, had in self._had.items() if key in wanting}

    def next_of(self, keys: Iterable[Key]) -> Key:
        """Return the key with the least service; the first of equals."""
        return min(keys, key=self._had.__getitem__)

    def charge(self, key: Key, tokens: int) -> None:
        """Record service to one key that other keys did not wait for."""
        self._had[key] = tokens + self._had.get(key, self._now)

    def serve(self, key: Key, tokens: int, weight: float, total_weight: float) -> None:
        """Record service to one key while keys of `total_weight` are active."""
        self._had[key] += tokens / weight
        self._now += tokens / total_weight
