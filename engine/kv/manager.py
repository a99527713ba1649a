"""The blocks of sequences: allocated, registered by name, swapped out and released.

A sequence has a block table per group of layers. A group with a window releases blocks before the window as soon as no step reads them any more;
other sequences can find them by name until they are reused. scheduler.py decides which sequence gets blocks first, and which one must give up its
blocks.
"""

from collections.abc import Callable, Iterable

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.layout import STATE_WINDOW
from pilotlight.engine.kv.pool.prefix_index import block_name, extend_chain
from pilotlight.engine.kv.tier_protocol import Tiers


class BlockManager:
    def __init__(self, pool: BlockPool, tiers: Tiers, groups: CacheGroups, has_states: bool = False) -> None:
        self._pool = pool
        self._tiers = tiers
        self._groups = groups
        # The groups of layers that keep a state, which needs a block for each draft.
        self._states = [i for i, window in enumerate(groups.windows) if has_states and window == STATE_WINDOW]
        self._has_windows = any(window is not None for window in groups.windows)

    def num_missing(self, sequence: Sequence) -> int:
        """Return an upper bound of the blocks that the sequence still needs until all its tokens are computed."""
        uncomputed = len(sequence.token_ids) - sequence.num_completed_tokens
        return max(0, self._groups.most_blocks(len(sequence.token_ids), uncomputed) - sequence.num_blocks)

    def num_spare(self, sequence: Sequence) -> int:
        """Return how many blocks to keep free for a running sequence: those it lacks, at least one per table."""
        return max(len(self._groups.windows), self.num_missing(sequence))

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the sequence's tables lack for `num_tokens` tokens."""
        return sum(max(0, self._groups.num_blocks(num_tokens) - len(table)) for table in sequence.tables)

    def num_needed(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Return an upper bound of the blocks that the sequence needs besides the cached ones of its prefix."""
        num_tokens = len(sequence.token_ids)
        uncomputed = num_tokens - prefix.num_blocks * self._groups.block_size
        return self._groups.most_blocks(num_tokens, uncomputed) - len(prefix.cached)

    def take(self, sequence: Sequence, prefix: CachedPrefix) -> list[int]:
        """Start the sequence's tables with its prefix; return new blocks for the part that a tier has."""
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
        """True if other sequences find this block under the name."""
        return self._pool.is_found(block, name)

    def end_fetch(self, sequence: Sequence, prefix: CachedPrefix, num_arrived: int) -> None:
        """Publish the missing blocks that a tier has filled; the sequence continues after them."""
        for (place, group), name in zip(prefix.missing[:num_arrived], prefix.names, strict=False):
            self._pool.register(sequence.tables[group].blocks[place], name)
        lost = prefix.missing[num_arrived:]
        sequence.num_registered_blocks = lost[0][0] if lost else prefix.num_blocks
        # A shorter prefix would need blocks of its window that were never taken, so compute everything.
        if lost and any(table.first for table in sequence.tables):
            held = [pair for table in sequence.tables for pair in table.pairs()]
            sequence.num_registered_blocks = 0
            if all([self._pool.generations[block] == generation for block, generation in held]):
                self._pool.release([block for block, _ in held])
                sequence.tables = [BlockTable() for _ in sequence.tables]

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block tables to `num_tokens` tokens; return False if no block is left.

        Blocks that it has taken stay in the tables, so that the next attempt needs fewer.
        """
        wanted = -(-num_tokens // self._groups.block_size)
        for table in sequence.tables:
            while len(table.blocks) < wanted:
                block = self._pool.allocate(sequence.share)
                if block is None:
                    return False
                table.append(block, self._pool.generations[block])
        return True

    def reserve_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Give a decoding sequence a block for the state after each draft; return how many drafts it may have.

        Blocks follow that of the newest token in the tables of layers with states. Drafts stay within the newest token's block, and do not fill it,
        so that no other sequence finds a state before it is in its place.
        """
        if not self._states:
            return num_drafts
        place, offset = divmod(len(sequence.token_ids) - 1, self._groups.block_size)
        tables = [sequence.tables[group] for group in self._states]
        num_drafts = min(num_drafts, self._groups.block_size - 2 - offset)
        if num_drafts < 1 or any(len(table) != place + 1 for table in tables):
            return 0
        if self._pool.num_available_in(sequence.share) < num_drafts * len(tables):
            return 0
        for table in tables:
            for _ in range(num_drafts):
                block = self._pool.allocate(sequence.share)
                assert block is not None, "blocks counted as available were not"
                table.append(block, self._pool.generations[block])
        return num_drafts

    def settle_drafts(self, sequence: Sequence, start: int, num_accepted: int) -> None:
        """Keep the state after the last accepted draft, and release the blocks of the others.

        `start`: position of the token before the drafts.
        """
        place = start // self._groups.block_size
        for group in self._states:
            table = sequence.tables[group]
            table.swap(place, place + num_accepted)
            left = table.cut(place + 1)
            # A block with another generation belongs to another sequence, due to a bug.
            self._pool.release([block for block, generation in left if self._pool.generations[block] == generation])

    def complete(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish and store the blocks that the first `num_tokens` tokens fill.

        Release blocks before a window, which neither running nor later steps read.
        """
        complete = num_tokens // self._groups.block_size
        if complete == sequence.num_registered_blocks and not self._has_windows:
            return
        if len(sequence.block_hashes) < complete:  # only tokens that are known already can be hashed
            known = sequence.token_ids[:num_tokens]
            size = self._groups.block_size
            extend_chain(sequence.block_hashes, sequence.chain_root, known, size, sequence.images)
        for group, table in enumerate(sequence.tables):
            for i in range(sequence.num_registered_blocks, complete):
                name = block_name(sequence.block_hashes[i], group)
                if self._pool.register(table.blocks[i], name):
                    self._tiers.store(table.blocks[i], name)
            if self._groups.windows[group] is not None:
                # Keep the window of the last token, because a sequence with equal tokens computes it again.
                self._drop_before(table, self._groups.first_seen(group, (num_tokens - 1) // self._groups.block_size))
        sequence.num_registered_blocks = complete

    def swap_out(self, sequence: Sequence) -> bool:
        """Start to copy the blocks that the next tokens see to the host tier; return False if it does not pay."""
        if sequence.wants_prompt_logprobs:
            return False  # the sequence computes the whole prompt again for its logprobs
        tables, generations = sequence.tables, self._pool.generations
        num_blocks = sequence.num_registered_blocks
        kept = [
            block_name(sequence.block_hashes[i], group)
            for i, group in self._groups.seen(num_blocks)
            # A block that another sequence has taken must not be stored under this name.
            if i >= tables[group].first and generations[tables[group].blocks[i]] == tables[group].generations[i]
        ]
        # Of two blocks with equal content use the one in the prefix cache: the tiers are notified before it is overwritten.
        found = [(self._pool.find(name, -1, sequence.share), name) for name in kept]
        blocks, names = [block for block, _ in found if block >= 0], [name for block, name in found if block >= 0]
        return self._tiers.swap_out(sequence, names, blocks, num_blocks * self._groups.block_size)

    def discard(self, sequence: Sequence) -> list[int]:
        """Drop the sequence's bad blocks from pool and tiers; return those that no other sequence holds."""
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
        """Release the sequence's blocks.

        If a block has a newer generation, it belongs to another sequence, due to a bug: correct its reference count by counting the tables of
        `holders` that have it.
        """
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
        """Release the blocks of a table before a position.

        Release none if one of them belongs to another sequence, due to a bug, which the next step reports.
        """
        dropped = table.before(first)
        if all([self._pool.generations[block] == generation for block, generation in dropped]):
            table.drop(len(dropped))
            self._pool.release([block for block, _ in dropped])
