"""The KV blocks of one model: who holds them, which are cached, which go first.

Knows block numbers and reference counts; refuses to know tensors, sequences and hashes' meaning. A block is in exactly
one of three states: held (count > 0), evictable (count 0, its content findable by hash) or free (count 0, content
worthless).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # a stack: the block used last is the likeliest to be in a CPU's cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that a new holder could take: free or evictable."""
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int | None:
        """A block nobody holds, its old content forgotten; None when every block is held."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        return block

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached run of a hash chain. Only `hold` makes them safe from eviction."""
        blocks = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would cease to be available if they were held."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_holders(self, block: int) -> int:
        return self._references[block]

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each block. A sequence's tail becomes evictable before its head: a chain is useless
        without its start."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than it was held"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_by_block:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, block_hash: bytes) -> None:
        """The block's content is complete and may be shared. The first block of a hash stays; a later twin remains
        private to its holder."""
        assert self._references[block] > 0, f"block {block} registered while nobody holds it"
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """Make the content of held blocks unfindable (it is known to be bad)."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} forgotten while nobody holds it"
            self._forget(block)

    def assert_consistent(self) -> None:
        held = sum(count > 0 for count in self._references)
        assert held + len(self._free) + len(self._evictable) == self.num_blocks
        assert all(count >= 0 for count in self._references)
        assert set(self._evictable) <= set(self._hash_by_block)
        assert not set(self._free) & set(self._hash_by_block)
        assert {h: b for b, h in self._hash_by_block.items()} == self._block_by_hash

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def _forget(self, block: int) -> None:
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
