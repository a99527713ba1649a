"""The blocks with recurrent states that a step reads and writes for its sequences.

The state after a token is in the token's own block (engine/kv/pool/layout.py). So for each sequence a step reads the block of the token before its
first one, and writes each block that has tokens of the step. A run is the tokens of a sequence in one block. If a sequence checks drafts, each token
is a run, and the state after each draft goes to one of the blocks that follow in the table: after the check, that of the last accepted draft takes
the token's place (engine/kv/manager.py). This module is independent of what a state contains.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain
from typing import NamedTuple

from pilotlight.engine.core.step import GroupInput, StepInput
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.kernels.state.state_batch import NO_BLOCK

StateGroups = Mapping[int, int]  # tokens per block of each group of layers that keeps states, by group number


class StatePlaces(NamedTuple):
    """The parts of a StateBatch on the host."""

    before: "array[int]"
    first_runs: "array[int]"
    ends: "array[int]"
    after: "array[int]"
    of_sequences: tuple[tuple[int, ...], ...]  # `ends` of each sequence's runs

    @classmethod
    def of(cls, step: StepInput, group: GroupInput, block_size: int) -> "StatePlaces":
        """Return the places of a step's sequences in the blocks of one group of layers."""
        before, after, decodes = array("q"), array("q"), step.num_decodes
        for i, (table, end, length) in enumerate(zip(group.tables, step.context_lens, step.lengths, strict=True)):
            start = end - length
            place = start // block_size
            before.append(table[(start - 1) // block_size] if start else NO_BLOCK)
            after += table[place : place + length if i < decodes else (end - 1) // block_size + 1]
        ends = tuple(run_ends(step.lengths, step.context_lens, decodes, block_size))
        return cls(before, array("q", accumulate(map(len, ends), initial=0)), array("q", chain(*ends)), after, ends)


def state_groups(caches: Iterable[LayerCache]) -> StateGroups:
    """Return the groups of a stage's layers that keep states."""
    return {cache.group: cache.block_size for cache in caches if cache.is_state and cache.segments}


def run_ends(
    lengths: Iterable[int], contexts: Iterable[int], num_decodes: int, block_size: int
) -> Iterator[tuple[int, ...]]:
    """Yield the ends of the runs of each sequence, as token indices in the step.

    `lengths`, `contexts`: tokens of each sequence in the step, and up to their end. A run has one token in the first `num_decodes` sequences and
    ends with its block in the others.
    """
    first = 0
    for i, (length, end) in enumerate(zip(lengths, contexts, strict=True)):
        start = end - length
        whole = range((start // block_size + 1) * block_size, end, block_size)
        stops = range(start + 1, end) if i < num_decodes else whole
        yield tuple([*(first + stop - start for stop in stops), first + length])
        first += length
