"""Which cached block goes first: the order of recency.py, with a memory of what went (ghosts, as in 2Q: Johnson and Shasha, VLDB 1994).

A block that was found again after it was cached is *protected*; the others are on *probation* and go first. So a pass over thousands
of blocks that are not asked for again pushes out its own kind only. Knows block numbers and hashes; refuses to know references and holders.
"""

from collections import OrderedDict

from pilotlight.engine.kv.recency import SegmentedOrder

# Evicted hashes remembered: a set that returns behind a scan of up to so many times the cache is known again. Each takes some 200 bytes, where
# its block took from 10 KB to 4 MB.
GHOSTS_PER_BLOCK = 4


class EvictionOrder(SegmentedOrder[int]):
    """The evictable blocks of a cache. A block weighs 1: its protected share is one of their number."""

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
        """Note that the hash's block was evicted."""
        self._ghosts[block_hash] = None
        self._trim_ghosts()

    def recall(self, block_hash: bytes) -> bool:
        """Tell whether the hash was evicted lately: what is cached a second time was needed twice."""
        return self._ghosts.pop(block_hash, _ABSENT) is not _ABSENT

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)


_ABSENT = object()
