"""The order of eviction of cached blocks: recency.py's, with ghosts (2Q, Johnson and Shasha, 1994).

A block that was found again after it was cached is *protected*; the others are on *probation* and are evicted first. So a scan of thousands of blocks
that are used once evicts only its own kind. Knows block numbers and hashes; does not know references and holders.
"""

from collections import OrderedDict

from pilotlight.engine.kv.recency import SegmentedOrder

# Number of remembered hashes of evicted blocks (ghosts): a set that returns after a scan of up to this many times the cache is recognised. Each takes
# some 200 bytes, its block took from 10 KB to 4 MB.
GHOSTS_PER_BLOCK = 4


class EvictionOrder(SegmentedOrder[int]):
    """The evictable blocks of a cache. Each weighs 1: the protected share is a share of their number."""

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
        """Record that the hash's block was evicted."""
        self._ghosts[block_hash] = None
        self._trim_ghosts()

    def recall(self, block_hash: bytes) -> bool:
        """True if the hash was evicted recently: a block that is cached again was needed twice."""
        return self._ghosts.pop(block_hash, _ABSENT) is not _ABSENT

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)


_ABSENT = object()
