"""The parts of a block that each rank of a group keeps.

Outside the device a block is *whole*: laid out as a single rank would keep it, whatever the number of ranks. So blocks in the tiers or in transfers
of a host with two ranks are valid for a host with one or four. A rank's part contains its heads of every segment; several ranks have the same heads
if there are fewer heads than ranks, or if the segment is a latent vector. The parts of pipeline stages follow each other. This module computes
offsets from layouts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.weights.shard import Shard


class Piece(NamedTuple):
    """A run of `size` bytes, at offset `whole` of the whole block and at offset `part` of a rank's part."""

    whole: int
    part: int
    size: int


class BlockParts(NamedTuple):
    """The pieces of a block, by rank."""

    pieces: tuple[tuple[Piece, ...], ...]
    whole_bytes: int
    part_bytes: int
    is_whole: bool  # False if the parts are concatenated, which is only valid for the same number of ranks

    @classmethod
    def of(cls, wholes: Sequence[CacheLayout], parts: Sequence[CacheLayout], per_stage: int) -> "BlockParts":
        """Map whole blocks to parts.

        `wholes`: per stage, the layout if it had a single rank. `parts`: per stage, the layout of each of its `per_stage` ranks.
        """
        whole_bytes, part_bytes = wholes[0].block_bytes, parts[0].block_bytes
        found = []
        for stage, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            for rank in range(per_stage):
                pieces = _pieces(whole, part, Shard(rank, per_stage))
                if pieces is None:
                    return cls._apart(len(wholes) * per_stage, part_bytes)
                found.append(tuple([piece._replace(whole=piece.whole + stage * whole_bytes) for piece in pieces]))
        return cls(tuple(found), len(wholes) * whole_bytes, part_bytes, is_whole=True)

    @classmethod
    def of_one(cls, block_bytes: int) -> "BlockParts":
        return cls(((Piece(0, 0, block_bytes),),), block_bytes, block_bytes, is_whole=True)

    @classmethod
    def _apart(cls, size: int, part_bytes: int) -> "BlockParts":
        pieces = [(Piece(rank * part_bytes, 0, part_bytes),) for rank in range(size)]
        return cls(tuple(pieces), size * part_bytes, part_bytes, is_whole=False)

    def put(self, rank: int, part: memoryview, whole: memoryview) -> None:
        """Copy a rank's part of a block to its places in the whole block."""
        for at, start, size in self.pieces[rank]:
            whole[at : at + size] = part[start : start + size]

    def take(self, rank: int, whole: memoryview, part: memoryview) -> None:
        """Copy a rank's part out of a whole block."""
        for at, start, size in self.pieces[rank]:
            part[start : start + size] = whole[at : at + size]


def _pieces(whole: CacheLayout, part: CacheLayout, shard: Shard) -> tuple[Piece, ...] | None:
    """Return the pieces that map a rank's part of a block to the whole block.

    Return None unless one list of pieces is valid for the blocks of all layer groups; a group with fewer pieces must have the first ones of the list.
    """
    # Each rank has its channels of a convolution in a segment of the whole size.
    if whole.groups != part.groups or (whole.has_states and shard.size > 1):
        return None
    of_groups = [tuple(_pieces_of(whole, part, group.layers, shard)) for group in whole.groups]
    longest = max(of_groups, key=len)
    if any(longest[: len(pieces)] != pieces for pieces in of_groups):
        return None
    return longest


def _pieces_of(whole: CacheLayout, part: CacheLayout, layers: Sequence[int], shard: Shard) -> Iterator[Piece]:
    for (at, segment), (start, own) in zip(whole.placed(layers), part.placed(layers), strict=True):
        of_head = whole.head_bytes(segment)
        yield Piece(at + segment.num_heads * shard.rank // shard.size * of_head, start, own.num_heads * of_head)
