"""Divides the tokens of a step into parts, which limits the memory for scores and for copies of keys."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pilotlight.engine.description.shapes import EXPANDED_BYTES
from pilotlight.engine.execution.batch import DecodeBatch
from pilotlight.kernels.attention.varlen import FEW_QUERIES, VarlenBatch

_SCORE_BYTES = 48  # of temporary memory per token and key, to score the keys and to select some


class Readers(NamedTuple):
    """Some tokens of a step, and the keys that they see."""

    rows: slice  # of the tokens of their batch
    block_tables: torch.Tensor  # [tokens, max_blocks] int64, or one row if all tokens are of one sequence
    visible: torch.Tensor  # [tokens] int64: a token sees so many first keys
    longest: int  # the most of them, or a limit of them


def longest_context(batch: DecodeBatch | VarlenBatch) -> int:
    return batch.max_context_len if isinstance(batch, DecodeBatch) else max(batch.host_context_lens)


def readers_of(batch: DecodeBatch | VarlenBatch, top_k: int, row_bytes: int) -> Iterator[Readers]:
    """Yield all tokens of a batch, as many at a time as memory allows.

    `row_bytes`: bytes of the cached vector of a token.
    """
    longest = longest_context(batch)
    at_once = max(1, EXPANDED_BYTES // max(2 * top_k * row_bytes, _SCORE_BYTES * longest))
    if isinstance(batch, DecodeBatch):
        yield from _cut(batch.block_tables, batch.context_lens, longest, at_once)
    elif max(batch.host_q_lens) <= FEW_QUERIES:
        yield from _cut(*batch.of_tokens(), longest, at_once)
    else:
        start = 0
        for i, (queries, context) in enumerate(zip(batch.host_q_lens, batch.host_context_lens, strict=True)):
            table = batch.block_tables[i : i + 1]
            for first in range(0, queries, at_once):
                end = min(first + at_once, queries)
                seen = context - queries + end
                visible = torch.arange(seen - end + first + 1, seen + 1, device=table.device)
                yield Readers(slice(start + first, start + end), table, visible, seen)
            start += queries


def _cut(tables: torch.Tensor, visible: torch.Tensor, longest: int, at_once: int) -> Iterator[Readers]:
    for first in range(0, len(tables), at_once):
        rows = slice(first, min(first + at_once, len(tables)))
        yield Readers(rows, tables[rows], visible[rows], longest)
