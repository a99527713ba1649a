"""The arithmetic of the blocks that the groups of a model's layers need.

Every group has a separate block table, and all take their blocks from one pool. Layers with full attention need the blocks of all tokens; layers with
a window need only the last blocks, and release the others.
"""

from bisect import bisect_right
from typing import NamedTuple

Place = tuple[int, int]  # (position in a table, group)
Windows = tuple[int | None, ...]  # per group, number of tokens that a query sees, itself included; None if unlimited


class CacheGroups(NamedTuple):
    block_size: int
    max_chunk: int  # most tokens of one sequence in one step
    windows: Windows = (None,)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that tokens fill in one group."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, group: int, num_blocks: int) -> int:
        """Return the first block that tokens after `num_blocks` complete blocks see."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_blocks - self._window_blocks(window))

    def seen(self, num_blocks: int) -> list[Place]:
        """Return the places of all blocks that tokens after `num_blocks` complete blocks see, by position."""
        firsts = [self.first_seen(group, num_blocks) for group in range(len(self.windows))]
        return [(i, group) for i in range(min(firsts), num_blocks) for group, first in enumerate(firsts) if i >= first]

    def most_blocks(self, num_tokens: int, num_uncomputed: int) -> int:
        """Return the most blocks, over all groups, that a sequence holds at once while it is computed."""
        filled, chunk = self.num_blocks(num_tokens), self.num_blocks(min(num_uncomputed, self.max_chunk))
        return sum(
            filled if window is None else min(filled, self._window_blocks(window) + chunk + 1)
            for window in self.windows
        )

    def longest_context(self, num_blocks: int, at_most: int) -> int:
        """Return how many tokens, at most `at_most`, one sequence can have with `num_blocks` blocks."""
        lengths = range(0, at_most + self.block_size, self.block_size)
        longest = lengths[bisect_right(lengths, num_blocks, key=lambda length: self.most_blocks(length, length)) - 1]
        return min(longest, at_most)

    def _window_blocks(self, window: int) -> int:
        """Return how many complete blocks the window of the next token covers; at least one."""
        return max(1, self.num_blocks(window - 1))
