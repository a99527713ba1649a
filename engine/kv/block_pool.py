"""The KV blocks of one model: which are held, which are cached, which go first.

Knows block numbers and reference counts; refuses to know tensors, sequences and hashes' meaning. A block that the pool
has is in exactly one of three states: held (count > 0), evictable (count 0, its content findable by hash) or free
(count 0, content worthless). Blocks come and go while the model lives: slab_allocator.py says when.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from engine.kv.eviction import EvictionOrder


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        capacity: int | None = None,
        borrow: Callable[[], bool] = lambda: False,
        on_forget: Callable[[int], None] = lambda block: None,
    ) -> None:
        """`capacity`: block numbers are below it, however many blocks are added later. `borrow` is asked for more when none is free, before any is
        evicted: it adds some and returns True, or False. `on_forget` is told every cached block whose content is about to be overwritten or is known
        to be bad."""
        capacity = num_blocks if capacity is None else capacity
        self.num_blocks = num_blocks
        # How often each block was handed out anew. A holder keeps the number; tags.py compares before every step.
        self.generations = array("q", bytes(8 * capacity))
        self._borrow = borrow
        self._on_forget = on_forget
        self._references = [0] * capacity
        self._is_present = bytearray(b"\1" * num_blocks + bytes(capacity - num_blocks))
        self._is_reused = bytearray(capacity)  # found by its hash since it was cached
        # A heap: low numbers are handed out first, so that held blocks stay close and whole slabs can go back.
        self._free = list(range(num_blocks))
        self._evictable = EvictionOrder(num_blocks)
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that a new holder could take: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def add_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert not self._is_present[block], f"block {block} was added twice"
            self._is_present[block] = 1
            heappush(self._free, block)
            self.num_blocks += 1
        self._evictable.resize(self.num_blocks)

    def remove_blocks(self, blocks: Iterable[int]) -> None:
        """Remove blocks that no sequence holds, cached content and all; those that are not there are passed over."""
        gone = {block for block in blocks if self._is_present[block]}
        for block in gone:
            assert self._references[block] == 0, f"block {block} was removed while it is held"
            if block in self._evictable:
                self._evictable.remove(block)
            self._forget(block)
            self._is_present[block] = 0
            self.generations[block] += 1
        self._free = [block for block in self._free if block not in gone]
        heapify(self._free)
        self.num_blocks -= len(gone)
        self._evictable.resize(self.num_blocks)

    def is_held(self, blocks: range) -> bool:
        """Tell whether one of them is held."""
        return any(self._references[blocks.start : blocks.stop])

    def num_cached(self, blocks: range) -> int:
        return sum(block in self._hash_by_block for block in blocks)

    def make_room(self, num_blocks: int) -> None:
        """Borrow until so many blocks are free, or until there is nothing to borrow."""
        while len(self._free) < num_blocks and self._borrow():
            pass

    def allocate(self) -> int | None:
        """Take a block that is not held and forget its content; None when every block is held."""
        self.make_room(1)
        if self._free:
            block = heappop(self._free)
        elif self._evictable:
            block = self._evictable.pop()
            self._evictable.remember(self._hash_by_block[block])
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        self.generations[block] += 1
        return block

    def has(self, block_name: bytes) -> bool:
        return block_name in self._block_by_hash

    def find(self, block_name: bytes, default: int) -> int:
        """Return the block that is cached under a name. Only `hold` makes it safe from eviction."""
        return self._block_by_hash.get(block_name, default)

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that would cease to be available if they were held."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_holders(self, block: int) -> int:
        return self._references[block]

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found, which are worth more than those that were not."""
        for block in blocks:
            if self._references[block] == 0:
                self._evictable.remove(block)
            self._references[block] += 1
            self._is_reused[block] = 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each block. A sequence's tail becomes evictable before its head: a chain is useless
        without its start."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than it was held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._settle(block)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Let a block whose content is complete be found. The first block of a hash stays; a later twin remains
        private to its holder, which is answered with False."""
        assert self._references[block] > 0, f"block {block} registered while it is not held"
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash
            self._is_reused[block] = self._evictable.recall(block_hash)
            return True
        return False

    def forget(self, blocks: Iterable[int]) -> None:
        """Make the content of held blocks unfindable (it is known to be bad)."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} forgotten while it is not held"
            self._forget(block)

    def discard(self, block_names: Iterable[bytes]) -> list[int]:
        """Forget content that is known to be bad, held or not, and return the blocks that nobody holds."""
        free = []
        for name in block_names:
            block = self._block_by_hash.get(name)
            if block is None:
                continue
            if self._references[block] == 0:
                self._evictable.remove(block)
                heappush(self._free, block)
                free.append(block)
            self._forget(block)
        return free

    def recount(self, block: int, num_holders: int) -> None:
        """Correct a reference count that is in doubt: so many are known to hold the block. Its content is forgotten when none does."""
        if self._references[block] > 0:
            self._references[block] = num_holders
            if num_holders == 0:
                self._forget(block)
                self._settle(block)

    def assert_consistent(self) -> None:
        held = sum(count > 0 for count in self._references)
        assert held + len(self._free) + len(self._evictable) == self.num_blocks == sum(self._is_present)
        assert all(count == 0 or here for count, here in zip(self._references, self._is_present, strict=True))
        assert all(count >= 0 for count in self._references)
        evictable = set(self._evictable)
        assert evictable <= set(self._hash_by_block)
        assert not set(self._free) & set(self._hash_by_block)
        assert all(self._references[block] == 0 and self._is_present[block] for block in [*self._free, *evictable])
        assert {h: b for b, h in self._hash_by_block.items()} == self._block_by_hash

    def _settle(self, block: int) -> None:
        """Make a block that is no longer held free or evictable."""
        if block in self._hash_by_block:
            self._evictable.add(block, 1, protected=bool(self._is_reused[block]))
        else:
            heappush(self._free, block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._on_forget(block)
