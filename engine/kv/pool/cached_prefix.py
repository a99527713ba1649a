"""The longest prefix of a sequence that need not be computed, since device or tiers have its blocks.

manager.py gives these blocks to the sequence.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.groups import CacheGroups, Place
from pilotlight.engine.kv.pool.prefix_index import block_name, extend_chain
from pilotlight.engine.kv.tier_protocol import Tiers

_MISSING = -1
_PLACES = (("host", "disk", "store"), ("host", "disk"), ("host",))  # tiers of a prefix, tried in this order


class CachedPrefix(NamedTuple):
    """A sequence's prefix that need not be computed. Its *visible* blocks are those that later tokens see."""

    num_blocks: int  # length of the prefix, in blocks of tokens
    tables: list[list[int]]  # per group, the visible blocks; _MISSING for a block that a tier has
    cached: list[int]  # visible blocks of all groups that are on the device
    num_cached: int  # length of the part of the prefix that is on the device, in blocks of tokens
    missing: tuple[Place, ...] = ()  # positions of visible blocks that a tier has, head of the prefix first
    names: tuple[bytes, ...] = ()  # names of the missing blocks
    num_behind: int = 0  # number of missing blocks that are not in the host tier
    num_in_store: int = 0  # number of missing blocks that are read from the store


class PrefixLookup:
    def __init__(self, pool: BlockPool, tiers: Tiers, groups: CacheGroups, shares_prefixes: bool) -> None:
        """Make a lookup. `shares_prefixes`: False if bidirectional attention prevents sharing."""
        self._pool = pool
        self._tiers = tiers
        self._groups = groups
        self._shares_prefixes = shares_prefixes

    def num_sharable(self, sequence: Sequence) -> int:
        """Return how many blocks of tokens may come from other sequences.

        Excludes tokens whose logits are needed, at least the last one: these are computed even if their blocks are cached.
        """
        last, needed = len(sequence.token_ids) - 1, sequence.first_needed_token
        return (last if needed is None else min(last, needed)) // self._groups.block_size

    def names_elsewhere(self, sequence: Sequence) -> list[bytes]:
        """Return the names of visible blocks that are neither on the device nor in the host tier, head first."""
        hashes = self._sharable(sequence)
        names = [block_name(hashes[i], group) for i, group in self._groups.seen(len(hashes))]
        is_here = partial(self._pool.has, share=sequence.share)
        return [name for name in names if not is_here(name) and self._tiers.place_of(name) != "host"]

    def find_cached(self, sequence: Sequence) -> CachedPrefix:
        """Return the sequence's longest prefix on the device, in its share."""
        hashes, share = self._sharable(sequence), sequence.share
        found = self._longest(hashes, 0, partial(self._pool.has, share=share))
        return self._prefix(hashes, found, found, share)

    def find_in_tiers(self, sequence: Sequence, cached: CachedPrefix) -> CachedPrefix:
        """Return a longer prefix with blocks from the tiers if fetching pays off, else `cached`."""
        hashes = self._sharable(sequence)
        was_read = sequence.num_disk_blocks is not None or sequence.num_store_blocks is not None
        refused = -1
        for places in _PLACES[-1:] if was_read else _PLACES:
            found = self._longest(hashes, cached.num_blocks, self._has_in(places, sequence.share))
            if found == cached.num_blocks:
                return cached
            if found == refused:  # the same prefix again: it did not pay off
                continue
            prefix = self._prefix(hashes, found, cached.num_blocks, sequence.share)
            num_tokens = (found - cached.num_blocks) * self._groups.block_size
            if self._tiers.pays(prefix.names, num_tokens):
                return prefix
            refused = found
        return cached

    def names_unknown(self, sequence: Sequence) -> list[bytes]:
        """Return the names of the sequence's blocks that are neither on the device nor known to be in a tier."""
        hashes = self._sharable(sequence)
        names = [name for group in range(len(self._groups.windows)) for name in self._names(hashes, group)]
        is_here = partial(self._pool.has, share=sequence.share)
        return [name for name in names if not is_here(name) and self._tiers.place_of(name) is None]

    def _sharable(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the sequence's blocks that may come from other sequences."""
        if not self._shares_prefixes or not self.num_sharable(sequence):
            return []
        size = self._groups.block_size
        extend_chain(sequence.block_hashes, sequence.chain_root, sequence.token_ids, size, sequence.images)
        return sequence.block_hashes[: self.num_sharable(sequence)]

    def _has_in(self, places: tuple[str, ...], share: int) -> Callable[[bytes], bool]:
        return lambda name: self._pool.has(name, share) or self._tiers.place_of(name) in places

    def _longest(self, hashes: list[bytes], known: int, has: Callable[[bytes], bool]) -> int:
        """Return the length, in blocks of tokens, of the longest prefix whose visible blocks all exist.

        `known`: a length for which they are known to exist.
        """
        longest = len(hashes)
        for group, window in enumerate(self._groups.windows):
            if window is None:
                names = self._names(hashes[known:longest], group)
                longest = known + sum([1 for _ in takewhile(has, names)])
        while longest > known:
            # Search backwards, because a missing block rules out every prefix whose later tokens see it.
            gaps = [
                gap
                for group in range(len(self._groups.windows))
                if (gap := self._gap(hashes, longest, group, has)) >= 0
            ]
            if not gaps:
                break
            longest = max(known, min(gaps))
        return longest

    def _gap(self, hashes: list[bytes], num_blocks: int, group: int, has: Callable[[bytes], bool]) -> int:
        """Return the last missing block in the window after `num_blocks` blocks, or -1 if none is missing."""
        if self._groups.windows[group] is None:
            return -1
        seen = range(self._groups.first_seen(group, num_blocks), num_blocks)
        return next((i for i in reversed(seen) if not has(block_name(hashes[i], group))), -1)

    def _prefix(self, hashes: list[bytes], num_blocks: int, num_cached: int, share: int) -> CachedPrefix:
        tables, missing = [], []
        for group in range(len(self._groups.windows)):
            first = self._groups.first_seen(group, num_blocks)
            names = self._names(hashes[first:num_blocks], group)
            table = [self._pool.find(name, _MISSING, share) for name in names]
            tables.append(table)
            if _MISSING in table:
                found = enumerate(zip(table, names, strict=True), first)
                missing += [((i, group), name) for i, (block, name) in found if block == _MISSING]
        missing.sort()
        places = Counter([self._tiers.place_of(name) for _, name in missing])
        return CachedPrefix(
            num_blocks,
            tables,
            cached=[block for table in tables for block in table if block != _MISSING],
            num_cached=num_cached,
            missing=tuple([place for place, _ in missing]),
            names=tuple([name for _, name in missing]),
            num_behind=places["disk"] + places["store"],
            num_in_store=places["store"],
        )

    @staticmethod
    def _names(hashes: list[bytes], group: int) -> list[bytes]:
        return hashes if group == 0 else [block_name(one, group) for one in hashes]
