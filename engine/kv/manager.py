"""A sequence's blocks from its first to its last: found in the prefix cache or in a tier, taken, grown, registered by hash, swapped out, released.

Knows block tables, hashes and generations; refuses to know which sequence goes first, and why one must give its blocks back (scheduler.py).
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import islice

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import extend_chain
from engine.kv.tiers import TierHit, Tiers
from engine.sequence import Sequence


class BlockManager:
    def __init__(self, pool: BlockPool, tiers: Tiers, block_size: int, shares_prefixes: bool) -> None:
        """`shares_prefixes`: False where no sequence finds another's blocks, since all tokens of a prompt see each other."""
        self._pool = pool
        self._tiers = tiers
        self._block_size = block_size
        self._shares_prefixes = shares_prefixes

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def num_missing(self, sequence: Sequence) -> int:
        """Count the blocks until all tokens of the sequence have a place."""
        return self.num_blocks(len(sequence.token_ids)) - len(sequence.block_table)

    def num_sharable(self, sequence: Sequence) -> int:
        """Count the blocks that may be another sequence's, short of the last token: its logits are needed, so it is computed even when its block is
        cached."""
        return (len(sequence.token_ids) - 1) // self._block_size

    def find_cached(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the sequence's cached prefix."""
        if sequence.needs_every_token or not self._shares_prefixes:
            return []
        extend_chain(sequence.block_hashes, sequence.chain_root, sequence.token_ids, self._block_size)
        return self._pool.find_prefix(sequence.block_hashes[: self.num_sharable(sequence)])

    def find_in_tiers(self, sequence: Sequence, num_cached: int) -> TierHit:
        """Return how far its prompt continues in the tiers, behind the cached blocks."""
        if sequence.needs_every_token or not self._shares_prefixes:
            return TierHit()
        hashes = sequence.block_hashes[num_cached : self.num_sharable(sequence)]
        return self._tiers.lookup(hashes, with_disk=sequence.num_disk_blocks is None)

    def take(self, sequence: Sequence, cached: list[int]) -> None:
        """Begin the sequence's table with cached blocks."""
        self._pool.hold(cached)
        sequence.block_table = array("q", cached)
        sequence.block_generations = array("q", [self._pool.generations[block] for block in cached])
        sequence.num_registered_blocks = len(cached)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table to `num_tokens`. Blocks taken before a failure stay: the next attempt needs fewer."""
        while len(sequence.block_table) < self.num_blocks(num_tokens):
            block = self._pool.allocate()
            if block is None:
                return False
            sequence.block_table.append(block)
            sequence.block_generations.append(self._pool.generations[block])
        return True

    def complete(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that the first `num_tokens` tokens fill, and the tiers keep them."""
        complete = num_tokens // self._block_size
        if len(sequence.block_hashes) < complete:  # only of tokens that are known
            extend_chain(sequence.block_hashes, sequence.chain_root, sequence.token_ids[:num_tokens], self._block_size)
        for i in range(sequence.num_registered_blocks, complete):
            if self._pool.register(sequence.block_table[i], sequence.block_hashes[i]):
                self._tiers.store(sequence.block_table[i], sequence.block_hashes[i])
        sequence.num_registered_blocks = complete

    def register_fetched(self, sequence: Sequence, num_cached: int, num_fetched: int) -> None:
        """Let others find the blocks that a tier has filled, behind the cached ones."""
        sequence.num_registered_blocks = num_cached + num_fetched
        for i in range(num_cached, sequence.num_registered_blocks):
            self._pool.register(sequence.block_table[i], sequence.block_hashes[i])

    def swap_out(self, sequence: Sequence) -> bool:
        """Keep the sequence's complete blocks in the host tier, where that is cheaper than computing them again."""
        if sequence.wants_prompt_logprobs:
            return False  # it will compute all of them again
        generations = self._pool.generations
        table = zip(sequence.block_table, sequence.block_generations, sequence.block_hashes, strict=False)
        kept = [
            (block, block_hash)
            for block, generation, block_hash in islice(table, sequence.num_registered_blocks)
            if generations[block] == generation  # what was handed to another must not be kept under this one's name
        ]
        hashes, blocks = [block_hash for _, block_hash in kept], [block for block, _ in kept]
        return self._tiers.swap_out(sequence, hashes, blocks)

    def release(self, sequence: Sequence, holders: Callable[[], Iterable[Sequence]]) -> None:
        """Give the sequence's blocks back. A block whose generation rose is another's, by a mistake of ours: its holders are counted among
        the other sequences that have blocks."""
        generations = self._pool.generations
        table = list(zip(sequence.block_table, sequence.block_generations, strict=True))
        self._pool.release([block for block, generation in table if generations[block] == generation])
        sequence.forget_blocks()
        for lost in [block for block, generation in table if generations[block] != generation]:
            holding = [
                pair
                for other in holders()
                for pair in zip(other.block_table, other.block_generations, strict=True)
                if pair == (lost, generations[lost])
            ]
            self._pool.recount(lost, len(holding))
