"""The order in which cached things give way, so that one long scan does not push out what is used again and again.

Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994): newcomers are on
probation; what is hit there becomes protected; the protected that are unused for longest go back on probation when they weigh too much. The
first to go is the oldest on probation. Knows keys and weights; refuses to know what they stand for.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# The paper's best share lay between 0.6 and 0.8 of the cache: when everything was found once, the rest still lets newcomers prove themselves.
PROTECTED_SHARE = 0.8


class SegmentedOrder(Generic[K]):
    def __init__(self, capacity: int) -> None:
        self._protected_capacity = int(capacity * PROTECTED_SHARE)
        self._protected_weight = 0
        self._probation: OrderedDict[K, int] = OrderedDict()  # key -> weight, oldest first
        self._protected: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._probation or key in self._protected

    def __iter__(self) -> Iterator[K]:
        """Iterate in the order in which they would go."""
        yield from self._probation
        yield from self._protected

    def add(self, key: K, weight: int, protected: bool = False) -> None:
        """Add a key as the newest of its segment."""
        assert key not in self
        if not protected:
            self._probation[key] = weight
            return
        self._protected[key] = weight
        self._protected_weight += weight
        self._demote()

    def resize(self, capacity: int) -> None:
        """Note what all weigh together at most from now on."""
        self._protected_capacity = int(capacity * PROTECTED_SHARE)
        self._demote()

    def refresh(self, key: K) -> None:
        """Make a key the newest of its segment without a hit: it is only told apart from what came before it."""
        (self._protected if key in self._protected else self._probation).move_to_end(key)

    def remove(self, key: K) -> bool:
        """Remove a key. True if it was protected."""
        if key in self._probation:
            del self._probation[key]
            return False
        self._protected_weight -= self._protected.pop(key)
        return True

    def oldest(self) -> K | None:
        """Return the next to go."""
        for segment in (self._probation, self._protected):
            for key in segment:
                return key
        return None

    def _demote(self) -> None:
        while self._protected_weight > self._protected_capacity:
            demoted, weight = self._protected.popitem(last=False)
            self._protected_weight -= weight
            self._probation[demoted] = weight  # as the newest of them: it was worth more than they are
