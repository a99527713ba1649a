"""The blocks from which a step reads the recurrent states of its sequences, and to which it writes.

The state after a token is in the token's own block (engine/kv/pool/layout.py). So a step reads the block of the token before a sequence's first one,
and writes each block that has tokens of the step. Knows block tables and lengths, but not what a state contains.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pilotlight.engine.execution.batch import Batch, GroupBatch
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.kernels.attention.varlen import VarlenBatch


class PromptStates(NamedTuple):
    """Tokens of one sequence, computed in runs; each run ends with a block or with the last token."""

    first: int  # index of its first token in the step
    ends: tuple[int, ...]  # of the runs, as indices in the step
    before: torch.Tensor | None  # [1] int64: block of the state before `first`; None at a sequence's start
    after: torch.Tensor  # [runs] int64: blocks for the states after each run

    @property
    def runs(self) -> Iterator[slice]:
        start = self.first
        for end in self.ends:
            yield slice(start, end)
            start = end


class StatePlaces(NamedTuple):
    num_decoded: int  # tokens at the start of the step, one for each decoding sequence
    before: torch.Tensor | None  # [num_decoded] int64: blocks to read states from; None if no sequence decodes
    after: torch.Tensor | None  # [num_decoded] int64: blocks to write states to
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
    """Return the places of each group of layers that keeps states, by the number of the group."""
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
