"""The blocks of one sequence in one group of layers, by position.

The entry of a released block points at another block of the sequence: a kernel may read that one, because its content is finite and attention masks
it. This module is independent of the pool.
"""

from array import array
from collections.abc import Iterable, Iterator


class BlockTable:
    __slots__ = ("blocks", "first", "generations")

    def __init__(self, blocks: Iterable[int] = (), generations: Iterable[int] = (), first: int = 0) -> None:
        """Make a table of `blocks` from position `first` on; there must be at least one if `first` is not 0.

        `generations`: the generation of each block when it was taken.
        """
        # Arrays, not lists, because a step copies whole tables into its tensors: 64 tables of 250 blocks in 0.02 ms instead of 0.3.
        self.blocks = array("q", blocks)
        self.generations = array("q", generations)
        self.first = 0  # position of the first held block
        if first:
            self.blocks = array("q", [self.blocks[0]]) * first + self.blocks
            self.generations = array("q", [self.generations[0]]) * first + self.generations
            self.first = first

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.first

    @property
    def held(self) -> "array[int]":
        return self.blocks[self.first :] if self.first else self.blocks

    @property
    def held_generations(self) -> "array[int]":
        return self.generations[self.first :] if self.first else self.generations

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each held block with its generation."""
        return zip(self.held, self.held_generations, strict=True)

    def append(self, block: int, generation: int) -> None:
        self.blocks.append(block)
        self.generations.append(generation)

    def before(self, place: int) -> list[tuple[int, int]]:
        """Return the held blocks before a position with their generations, never the last block of the table."""
        end = min(place, len(self.blocks) - 1)
        return list(zip(self.blocks[self.first : end], self.generations[self.first : end], strict=True))

    def swap(self, place: int, other: int) -> None:
        """Exchange the blocks at two positions."""
        for numbers in (self.blocks, self.generations):
            numbers[place], numbers[other] = numbers[other], numbers[place]

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Remove the blocks from position `length` on, and return them with their generations."""
        removed = list(zip(self.blocks[length:], self.generations[length:], strict=True))
        del self.blocks[length:], self.generations[length:]
        return removed

    def drop(self, num_blocks: int) -> None:
        """Drop the first `num_blocks` held blocks: their entries then point at the first remaining block."""
        if num_blocks:
            self.first = first = self.first + num_blocks
            self.blocks[:first] = self.blocks[first : first + 1] * first
            self.generations[:first] = self.generations[first : first + 1] * first
