"""A sequence's blocks from its first to its last: taken, grown, registered by name, swapped out, released.

Each group of layers has a table. Those of a group that sees a window lose the blocks behind it as soon as no step reads them any more; others may
still find these, until they are handed out anew. Knows block tables, names and generations; refuses to know which sequence goes first, and why one
must give its blocks back (scheduler.py).
"""

from collections.abc import Callable, Iterable

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.prefix_index import block_name, extend_chain
from pilotlight.engine.kv.tier_protocol import Tiers


class BlockManager:
    def __init__(self, pool: BlockPool, tiers: Tiers, groups: CacheGroups) -> None:
        self._pool = pool
        self._tiers = tiers
        self._groups = groups
        self._has_windows = any(window is not None for window in groups.windows)

    def num_missing(self, sequence: Sequence) -> int:
        """Count the blocks that the sequence may lack until all its tokens are computed."""
        uncomputed = len(sequence.token_ids) - sequence.num_completed_tokens
        return max(0, self._groups.most_blocks(len(sequence.token_ids), uncomputed) - sequence.num_blocks)

    def num_spare(self, sequence: Sequence) -> int:
        """Count the blocks to leave to a running sequence: what it lacks, and one for each table at least."""
        return max(len(self._groups.windows), self.num_missing(sequence))

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Count the blocks by which the sequence's tables are too short for so many tokens."""
        return sum(max(0, self._groups.num_blocks(num_tokens) - len(table)) for table in sequence.tables)

    def num_needed(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Count the blocks that the sequence may need besides those of its prefix that are cached."""
        num_tokens = len(sequence.token_ids)
        uncomputed = num_tokens - prefix.num_blocks * self._groups.block_size
        return self._groups.most_blocks(num_tokens, uncomputed) - len(prefix.cached)

    def take(self, sequence: Sequence, prefix: CachedPrefix) -> list[int]:
        """Begin the sequence's tables with its prefix. Return the blocks into which the missing part of it is to be fetched."""
        self._pool.hold(prefix.cached)
        fresh = []
        for place, group in prefix.missing:
            block = self._pool.allocate(sequence.share)
            assert block is not None, "blocks counted as available were not"
            prefix.tables[group][place - prefix.num_blocks] = block
            fresh.append(block)
        generations = self._pool.generations
        sequence.tables = [
            BlockTable(blocks, [generations[block] for block in blocks], prefix.num_blocks - len(blocks))
            for blocks in prefix.tables
        ]
        sequence.num_registered_blocks = 0 if fresh else prefix.num_blocks
        return fresh

    def is_cached(self, block: int, name: bytes) -> bool:
        """Tell whether it is this block that others find under a name."""
        return self._pool.is_found(block, name)

    def end_fetch(self, sequence: Sequence, prefix: CachedPrefix, num_arrived: int) -> None:
        """Let others find the blocks that a tier has filled, the first ones of those that were missing, and the sequence go on behind them."""
        for (place, group), name in zip(prefix.missing[:num_arrived], prefix.names, strict=False):
            self._pool.register(sequence.tables[group].blocks[place], name)
        lost = prefix.missing[num_arrived:]
        sequence.num_registered_blocks = lost[0][0] if lost else prefix.num_blocks
        # what a window sees behind a shorter prefix is not there
        if lost and any(table.first for table in sequence.tables):
            held = [pair for table in sequence.tables for pair in table.pairs()]
            sequence.num_registered_blocks = 0
            if all([self._pool.generations[block] == generation for block, generation in held]):
                self._pool.release([block for block, _ in held])
                sequence.tables = [BlockTable() for _ in sequence.tables]

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block tables to `num_tokens`. Blocks taken before a failure stay: the next attempt needs fewer."""
        wanted = -(-num_tokens // self._groups.block_size)
        for table in sequence.tables:
            while len(table.blocks) < wanted:
                block = self._pool.allocate(sequence.share)
                if block is None:
                    return False
                table.append(block, self._pool.generations[block])
        return True

    def complete(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that the first `num_tokens` tokens fill, and the tiers keep them. Give back those that neither a step under way
        nor a later one sees."""
        complete = num_tokens // self._groups.block_size
        if complete == sequence.num_registered_blocks and not self._has_windows:
            return
        if len(sequence.block_hashes) < complete:  # only of tokens that are known
            known = sequence.token_ids[:num_tokens]
            size = self._groups.block_size
            extend_chain(sequence.block_hashes, sequence.chain_root, known, size, sequence.images)
        for group, table in enumerate(sequence.tables):
            for i in range(sequence.num_registered_blocks, complete):
                name = block_name(sequence.block_hashes[i], group)
                if self._pool.register(table.blocks[i], name):
                    self._tiers.store(table.blocks[i], name)
            if self._groups.windows[group] is not None:
                # Short of the last token, as one that has the same tokens begins behind it.
                self._drop_before(table, self._groups.first_seen(group, (num_tokens - 1) // self._groups.block_size))
        sequence.num_registered_blocks = complete

    def swap_out(self, sequence: Sequence) -> bool:
        """Keep what the sequence sees of its complete blocks in the host tier, where that is cheaper than computing them again."""
        if sequence.wants_prompt_logprobs:
            return False  # it will compute all of them again
        tables, generations = sequence.tables, self._pool.generations
        num_blocks = sequence.num_registered_blocks
        kept = [
            block_name(sequence.block_hashes[i], group)
            for i, group in self._groups.seen(num_blocks)
            # what was handed to another must not be kept under this one's name
            if i >= tables[group].first and generations[tables[group].blocks[i]] == tables[group].generations[i]
        ]
        # Of twins the one that others find: of its next use the tiers are told, and copy it until then.
        found = [(self._pool.find(name, -1, sequence.share), name) for name in kept]
        blocks, names = [block for block, _ in found if block >= 0], [name for block, name in found if block >= 0]
        return self._tiers.swap_out(sequence, names, blocks, num_blocks * self._groups.block_size)

    def discard(self, sequence: Sequence) -> list[int]:
        """Forget what the sequence has computed, here and in the tiers. Return the blocks that nobody else holds."""
        pool = self._pool
        blocks = [block for table in sequence.tables for block in table.held]
        pool.forget(blocks)
        names = [block_name(one, group) for group in range(len(self._groups.windows)) for one in sequence.block_hashes]
        self._tiers.forget(names)
        dropped = [
            block_name(one, group)
            for group, table in enumerate(sequence.tables)
            for one in sequence.block_hashes[: table.first]
        ]
        return [block for block in blocks if pool.num_holders(block) == 1] + pool.discard(dropped)

    def release(self, sequence: Sequence, holders: Callable[[], Iterable[Sequence]]) -> None:
        """Give the sequence's blocks back. A block whose generation rose is another's, by a mistake of ours: its holders are counted among
        the other sequences that have blocks."""
        places = sorted((i, g) for g, table in enumerate(sequence.tables) for i in range(table.first, len(table)))
        held = [(sequence.tables[g].blocks[i], sequence.tables[g].generations[i]) for i, g in places]
        sequence.tables = []
        sequence.epoch += 1
        generations = self._pool.generations
        self._pool.release([block for block, generation in held if generations[block] == generation])
        for block in [block for block, generation in held if generations[block] != generation]:
            holding = [
                pair
                for other in holders()
                for table in other.tables
                for pair in table.pairs()
                if pair == (block, generations[block])
            ]
            self._pool.recount(block, len(holding))

    def _drop_before(self, table: BlockTable, first: int) -> None:
        """Give back the blocks of a table before a position; none, if one is another's by a mistake of ours: the next step is told by it."""
        dropped = table.before(first)
        if all([self._pool.generations[block] == generation for block, generation in dropped]):
            table.drop(len(dropped))
            self._pool.release([block for block, _ in dropped])
