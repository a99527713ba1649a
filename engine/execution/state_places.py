"""Where the sequences of a step find the states of their layers, and where they leave them: blocks of one group of layers.

A token's state lies in the block of the table that the token itself lies in, so a step reads the block of the token before its first one, and writes
every block that its tokens reach (engine/kv/pool/layout.py). Knows tables and lengths; refuses to know what a state is.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pilotlight.engine.execution.batch import Batch, GroupBatch
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.kernels.attention.varlen import VarlenBatch


class PromptStates(NamedTuple):
    """A sequence whose tokens are computed in runs, each of which ends where a block does, or the chunk."""

    first: int  # of its tokens, among the step's
    ends: tuple[int, ...]  # of the runs, among the step's tokens
    before: (
        torch.Tensor | None
    )  # [1] int64, the block that has the state before the first token; None: it begins with this one
    after: torch.Tensor  # [runs] int64, the blocks in which the state behind each run is left

    @property
    def runs(self) -> Iterator[slice]:
        start = self.first
        for end in self.ends:
            yield slice(start, end)
            start = end


class StatePlaces(NamedTuple):
    num_decoded: int  # the first tokens of the step, one of each sequence
    before: torch.Tensor | None  # [num_decoded] int64, the block that has each one's state; None: the step has none
    after: torch.Tensor | None  # [num_decoded] int64, the block that takes it
    prompts: tuple[PromptStates, ...]

    @classmethod
    def of(cls, group: GroupBatch, block_size: int, num_decoded: int) -> "StatePlaces":
        assert group.verify is None, "a model with states checks no drafts"
        before = after = None
        if group.decode is not None:
            tables, last = group.decode.block_tables, group.decode.context_lens - 1
            before = tables.gather(1, ((last - 1) // block_size).unsqueeze(1)).squeeze(1)
            after = tables.gather(1, (last // block_size).unsqueeze(1)).squeeze(1)
        prompts = () if group.prefill is None else tuple(_prompts(group.prefill, block_size, num_decoded))
        return cls(num_decoded, before, after, prompts)


def state_places(batch: Batch, caches: Iterable[LayerCache]) -> dict[int, StatePlaces]:
    """Return the places of every group of layers that keeps states."""
    groups = {cache.group: cache.block_size for cache in caches if cache.is_state and cache.segments}
    return {group: StatePlaces.of(batch.groups[group], size, batch.num_decoded) for group, size in groups.items()}


def _prompts(varlen: VarlenBatch, block_size: int, first: int) -> Iterator[PromptStates]:
    for row, (length, end) in enumerate(zip(varlen.host_q_lens, varlen.host_context_lens, strict=True)):
        start, table = end - length, varlen.block_tables[row]
        stops = [*range((start // block_size + 1) * block_size, end, block_size), end]
        place = (start - 1) // block_size
        yield PromptStates(
            first,
            tuple([first + stop - start for stop in stops]),
            table[place : place + 1] if start else None,
            table[start // block_size : (end - 1) // block_size + 1],
        )
        first += length
