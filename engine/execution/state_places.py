"""The blocks with recurrent states that a step reads and writes for its sequences.

The state after a token is in the token's own block (engine/kv/pool/layout.py). So for each sequence a step reads the block of the token before its
first one, and writes each block that has tokens of the step. A run is the tokens of a sequence in one block. If a sequence checks drafts, each token
is a run, and the state after each draft goes to one of the blocks that follow in the table: after the check, that of the last accepted draft takes
the token's place (engine/kv/manager.py). This module is independent of what a state contains.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain

import torch

from pilotlight.engine.device.transfer import to_device
from pilotlight.engine.execution.batch import Batch, GroupBatch
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.state.state_batch import NO_BLOCK, StateBatch


def state_places(batch: Batch, caches: Iterable[LayerCache]) -> dict[int, StateBatch]:
    """Return the blocks of states for each group of layers that keeps states, by group number."""
    groups = {cache.group: cache.block_size for cache in caches if cache.is_state and cache.segments}
    return {group: _state_batch(batch.groups[group], size) for group, size in groups.items()}


def _state_batch(group: GroupBatch, block_size: int) -> StateBatch:
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    host_ends: list[tuple[int, ...]] = []
    if group.decode is not None:
        tables, last = group.decode.block_tables, (group.decode.context_lens - 1).unsqueeze(1)
        before.append(tables.gather(1, (last - 1) // block_size).squeeze(1))
        after.append(tables.gather(1, last // block_size).squeeze(1))
        host_ends += [(i + 1,) for i in range(len(tables))]
    if group.verify is not None:
        host_ends += _ends_of_drafts(group.verify)
        before += _before(group.verify, block_size)
        after += _after_drafts(group.verify, block_size)
    if group.prefill is not None:
        host_ends += _ends(group.prefill, block_size, host_ends[-1][-1] if host_ends else 0)
        before += _before(group.prefill, block_size)
        after += _after(group.prefill, block_size)
    first_runs = list(accumulate(map(len, host_ends), initial=0))
    numbers = _to_device([*first_runs, *chain(*host_ends)], group.slot_mapping.device)
    return StateBatch(
        torch.cat(before), numbers[: len(first_runs)], numbers[len(first_runs) :], torch.cat(after), tuple(host_ends)
    )


def _ends(varlen: VarlenBatch, block_size: int, first: int) -> Iterator[tuple[int, ...]]:
    """Yield the ends of the runs of each prompt, as token indices in the step.

    The first prompt starts at token `first`.
    """
    for length, end in zip(varlen.host_q_lens, varlen.host_context_lens, strict=True):
        start = end - length
        stops = (*range((start // block_size + 1) * block_size, end, block_size), end)
        yield tuple([first + stop - start for stop in stops])
        first += length


def _ends_of_drafts(varlen: VarlenBatch) -> Iterator[tuple[int, ...]]:
    """Yield the ends of runs of one token each."""
    end = 0
    for length in varlen.host_q_lens:
        yield tuple(range(end + 1, end + length + 1))
        end += length


def _after_drafts(varlen: VarlenBatch, block_size: int) -> Iterator[torch.Tensor]:
    for row, (length, end) in enumerate(zip(varlen.host_q_lens, varlen.host_context_lens, strict=True)):
        place = (end - length) // block_size
        yield varlen.block_tables[row, place : place + length]


def _before(varlen: VarlenBatch, block_size: int) -> Iterator[torch.Tensor]:
    for row, (length, end) in enumerate(zip(varlen.host_q_lens, varlen.host_context_lens, strict=True)):
        table, place = varlen.block_tables[row], (end - length - 1) // block_size
        yield table[place : place + 1] if length < end else torch.full_like(table[:1], NO_BLOCK)


def _after(varlen: VarlenBatch, block_size: int) -> Iterator[torch.Tensor]:
    for row, (length, end) in enumerate(zip(varlen.host_q_lens, varlen.host_context_lens, strict=True)):
        yield varlen.block_tables[row, (end - length) // block_size : (end - 1) // block_size + 1]


def _to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    if device.type == "meta":  # a dry run computes nothing
        return torch.empty(len(numbers), dtype=torch.int64, device=device)
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)
