"""The order of eviction of cached entries, resistant to long scans.

Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994): new keys are on
probation, and a hit makes them protected. When protected keys weigh too much, the least recently used of them return to probation. The oldest key on
probation is evicted first. This module is independent of what the keys represent.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Largest part of the cache for protected keys; in the paper 0.6 to 0.8 was best. The rest is for keys on probation, so that new keys live long enough
# to get a hit.
PROTECTED_SHARE = 0.8
# Most remembered hashes of evicted blocks (ghosts), as a multiple of the cache's number of blocks. A block that returns is recognised if no more
# blocks than that were evicted after it. A ghost takes some 200 bytes, its block took 10 KB to 4 MB.
GHOSTS_PER_BLOCK = 4
_ABSENT = object()


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
        """Iterate over the keys in the order of eviction."""
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
        """Set the upper bound of the total weight."""
        self._protected_capacity = int(capacity * PROTECTED_SHARE)
        self._demote()

    def refresh(self, key: K) -> None:
        """Make a key the newest of its segment without counting a hit."""
        (self._protected if key in self._protected else self._probation).move_to_end(key)

    def remove(self, key: K) -> bool:
        """Remove a key; return True if it was protected."""
        if key in self._probation:
            del self._probation[key]
            return False
        self._protected_weight -= self._protected.pop(key)
        return True

    def oldest(self) -> K | None:
        """Return the next key to evict, or None."""
        for segment in (self._probation, self._protected):
            for key in segment:
                return key
        return None

    def _demote(self) -> None:
        while self._protected_weight > self._protected_capacity:
            demoted, weight = self._protected.popitem(last=False)
            self._protected_weight -= weight
            self._probation[demoted] = weight  # newest: it was used more often than other keys on probation


class EvictionOrder(SegmentedOrder[int]):
    """The evictable blocks of a cache, with ghosts (2Q, Johnson and Shasha, 1994).

    Each block weighs 1, so the protected share is a share of the number of blocks. A scan of thousands of blocks that are used once evicts only other
    blocks that were used once.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # hashes of evicted blocks, oldest first
        self._max_ghosts = num_blocks * GHOSTS_PER_BLOCK

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._max_ghosts = capacity * GHOSTS_PER_BLOCK
        self._trim_ghosts()

    def pop(self) -> int:
        block = self.oldest()
        assert block is not None, "there is a block to evict"
        self.remove(block)
        return block

    def remember(self, block_hash: bytes) -> None:
        """Record that the block of this hash was evicted."""
        self._ghosts[block_hash] = None
        self._trim_ghosts()

    def recall(self, block_hash: bytes) -> bool:
        """Forget a ghost; return True if there was one, because its block is needed for the second time."""
        return self._ghosts.pop(block_hash, _ABSENT) is not _ABSENT

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
