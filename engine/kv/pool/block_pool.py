"""The KV blocks of one model: held, evictable or free, and the order of eviction.

This module is independent of tensors, sequences and the meaning of hashes. A block in the pool is in exactly one of three states: held (count > 0),
evictable (count 0, its content findable by hash) or free (count 0, its content worthless). lease.py adds and removes blocks while the model is open.

Each rank with separate sequences has a *share* of the blocks: block b belongs to share b % num_shares. A sequence takes and finds blocks of one share
only.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from pilotlight.engine.kv.recency import EvictionOrder


class _Share:
    """The free and evictable blocks of one share, and its index by hash."""

    def __init__(self, blocks: Iterable[int], num_blocks: int) -> None:
        # A heap, which hands out low numbers first, so that held blocks are in few slabs and other slabs can be returned.
        self.free = list(blocks)
        self.evictable = EvictionOrder(num_blocks)
        self.block_by_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.evictable)


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        capacity: int | None = None,
        borrow: Callable[[], bool] = lambda: False,
        on_forget: Callable[[int], None] = lambda block: None,
        num_shares: int = 1,
    ) -> None:
        """Make a pool.

        `capacity`: upper bound of block numbers, including blocks added later. `borrow` is called when no block is free, before one is evicted: it
        adds blocks and returns True, or returns False. `on_forget` is called for every cached block whose content will be overwritten or is bad.
        """
        capacity = num_blocks if capacity is None else capacity
        self.num_blocks = num_blocks
        # Per block, how often it was allocated or removed. A holder remembers this generation, to recognise later whether the block is still its own.
        self.generations = array("q", bytes(8 * capacity))
        self._borrow = borrow
        self._on_forget = on_forget
        self._references = [0] * capacity
        self._is_present = bytearray(b"\1" * num_blocks + bytes(capacity - num_blocks))
        self._is_reused = bytearray(capacity)  # per block, whether it was found by its hash since it was cached
        self._shares = [
            _Share(range(share, num_blocks, num_shares), num_blocks // num_shares) for share in range(num_shares)
        ]
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def shares(self) -> range:
        return range(len(self._shares))

    @property
    def num_available(self) -> int:
        """The number of free and evictable blocks."""
        return sum([share.num_available for share in self._shares])

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def num_available_in(self, share: int) -> int:
        """Return the number of free and evictable blocks of a share."""
        return self._shares[share].num_available

    def num_held_in(self, share: int) -> int:
        return self.num_blocks // len(self._shares) - self._shares[share].num_available

    def add_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert not self._is_present[block], f"block {block} was added twice"
            self._is_present[block] = 1
            heappush(self._share_of(block).free, block)
            self.num_blocks += 1
        self._resize()

    def remove_blocks(self, blocks: Iterable[int]) -> None:
        """Remove blocks that no sequence holds; ignore blocks that are not in the pool."""
        gone = {block for block in blocks if self._is_present[block]}
        for block in gone:
            assert self._references[block] == 0, f"block {block} was removed while it is held"
            evictable = self._share_of(block).evictable
            if block in evictable:
                evictable.remove(block)
            self._forget(block)
            self._is_present[block] = 0
            self.generations[block] += 1
        for share in self._shares:
            share.free = [block for block in share.free if block not in gone]
            heapify(share.free)
        self.num_blocks -= len(gone)
        self._resize()

    def is_held(self, blocks: range) -> bool:
        """True if at least one of the blocks is held."""
        return any(self._references[blocks.start : blocks.stop])

    def num_cached(self, blocks: range) -> int:
        return sum(block in self._hash_by_block for block in blocks)

    def make_room(self, num_blocks: int, share: int = 0) -> None:
        """Borrow until `num_blocks` blocks of a share are free, or nothing is left to borrow."""
        of = self._shares[share]
        while len(of.free) < num_blocks and self._borrow():
            pass

    def allocate(self, share: int = 0) -> int | None:
        """Hold a free block of a share, or evict one; return None if all blocks are held."""
        self.make_room(1, share)
        of = self._shares[share]
        if of.free:
            block = heappop(of.free)
        elif of.evictable:
            block = of.evictable.pop()
            of.evictable.remember(self._hash_by_block[block])
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        self.generations[block] += 1
        return block

    def has(self, block_name: bytes, share: int = 0) -> bool:
        return block_name in self._shares[share].block_by_hash

    def find(self, block_name: bytes, default: int, share: int = 0) -> int:
        """Return the share's block with this name, or `default`. Only `hold` protects it from eviction."""
        return self._shares[share].block_by_hash.get(block_name, default)

    def is_found(self, block: int, block_name: bytes) -> bool:
        """True if this is the block that its share finds under the name."""
        return self._share_of(block).block_by_hash.get(block_name) == block

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of these cached blocks have no holder."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_holders(self, block: int) -> int:
        return self._references[block]

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found by hash; when released, they are evicted later than blocks never found."""
        for block in blocks:
            if self._references[block] == 0:
                self._share_of(block).evictable.remove(block)
            self._references[block] += 1
            self._is_reused[block] = 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release one hold on each block.

        The tail of a chain becomes evictable before its head, without which it is useless.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than it was held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._settle(block)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Publish a block whose content is complete; return False if that is not done.

        It is not done if the block is published already, or if its share has another block with the hash: such a twin stays private to its holder.
        """
        assert self._references[block] > 0, f"block {block} registered while it is not held"
        share = self._share_of(block)
        if block_hash not in share.block_by_hash and block not in self._hash_by_block:
            share.block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash
            self._is_reused[block] = share.evictable.recall(block_hash)
            return True
        return False

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove held blocks from the index, because their content is bad."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} forgotten while it is not held"
            self._forget(block)

    def discard(self, block_names: Iterable[bytes]) -> list[int]:
        """Drop the blocks with these names, whose content is bad, and return those without a holder."""
        found = []
        names = list(block_names)
        for share in self._shares:
            for block in [share.block_by_hash[name] for name in names if name in share.block_by_hash]:
                if self._references[block] == 0:
                    share.evictable.remove(block)
                    heappush(share.free, block)
                    found.append(block)
                self._forget(block)
        return found

    def recount(self, block: int, num_holders: int) -> None:
        """Set a reference count that may be wrong to the known number of holders.

        If there are none, drop the content.
        """
        if self._references[block] > 0:
            self._references[block] = num_holders
            if num_holders == 0:
                self._forget(block)
                self._settle(block)

    def assert_consistent(self) -> None:
        held = sum(count > 0 for count in self._references)
        assert held + self.num_available == self.num_blocks == sum(self._is_present)
        assert all(count == 0 or here for count, here in zip(self._references, self._is_present, strict=True))
        assert all(count >= 0 for count in self._references)
        for number, share in enumerate(self._shares):
            evictable = set(share.evictable)
            found = {block: name for block, name in self._hash_by_block.items() if block % len(self._shares) == number}
            assert evictable <= set(found)
            assert not set(share.free) & set(found)
            assert all(block % len(self._shares) == number for block in [*share.free, *evictable])
            assert all(self._references[block] == 0 and self._is_present[block] for block in [*share.free, *evictable])
            assert {name: block for block, name in found.items()} == share.block_by_hash

    def _settle(self, block: int) -> None:
        """Make a block without holders free or evictable."""
        share = self._share_of(block)
        if block in self._hash_by_block:
            share.evictable.add(block, 1, protected=bool(self._is_reused[block]))
        else:
            heappush(share.free, block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._share_of(block).block_by_hash[block_hash]
            self._on_forget(block)

    def _share_of(self, block: int) -> _Share:
        return self._shares[block % len(self._shares)]

    def _resize(self) -> None:
        for share in self._shares:
            share.evictable.resize(self.num_blocks // len(self._shares))
