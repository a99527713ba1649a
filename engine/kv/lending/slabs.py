"""The arithmetic of one model's blocks over the slabs of an arena.

Every model sees the whole arena as an array of its blocks: block b is the bytes b * block_bytes to (b + 1) * block_bytes. It may use the blocks that
are entirely in slabs it has. A block is at most half a slab, so every slab adds at least one block, and a block touches at most two slabs.

Ranks with separate sequences (`copies`) have an arena each, and a slab is the same byte range in all of them. Block b belongs to rank b % copies,
where it is block b // copies.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class SlabGrid(NamedTuple):
    num_slabs: int
    slab_bytes: int
    block_bytes: int
    copies: int = 1

    @property
    def capacity(self) -> int:
        """The number of blocks in the whole arena, over all copies."""
        return self.copies * self._capacity

    @property
    def fits(self) -> bool:
        return 2 * self.block_bytes <= self.slab_bytes

    def blocks_in(self, slab: int) -> range:
        """Return the blocks that have at least one byte in the slab."""
        return self._of_all(self._blocks_in(slab))

    def completed_by(self, slab: int, owned: Collection[int]) -> range:
        """Return the blocks that the slab adds for a model that already has the slabs `owned`.

        Includes blocks that straddle the border to an owned neighbour.
        """
        blocks = self._blocks_in(slab)
        start, end = slab * self.slab_bytes, (slab + 1) * self.slab_bytes
        lacks_left = blocks.start * self.block_bytes < start and slab - 1 not in owned
        lacks_right = blocks.stop * self.block_bytes > end and slab + 1 not in owned
        return self._of_all(range(blocks.start + lacks_left, blocks.stop - lacks_right))

    def slabs_of(self, blocks: Iterable[int]) -> set[int]:
        slabs = set()
        for block in blocks:
            there = block // self.copies
            slabs.add(there * self.block_bytes // self.slab_bytes)
            slabs.add(((there + 1) * self.block_bytes - 1) // self.slab_bytes)
        return slabs

    def num_blocks(self, slabs: Collection[int]) -> int:
        """Return the number of blocks entirely in `slabs`."""
        total = 0
        for first, end in runs(sorted(slabs)):
            total += end * self.slab_bytes // self.block_bytes - -(-first * self.slab_bytes // self.block_bytes)
        return self.copies * total

    @property
    def _capacity(self) -> int:
        return self.num_slabs * self.slab_bytes // self.block_bytes

    def _blocks_in(self, slab: int) -> range:
        first = slab * self.slab_bytes // self.block_bytes
        return range(first, min(-(-(slab + 1) * self.slab_bytes // self.block_bytes), self._capacity))

    def _of_all(self, blocks: range) -> range:
        """Convert a range of blocks of one copy to the block numbers of all copies."""
        return range(self.copies * blocks.start, self.copies * blocks.stop)


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group sorted numbers into runs: [1, 2, 3, 7] -> [(1, 4), (7, 8)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
