"""One step's input as tensors: decodes first, prompt chunks behind them, all tokens in one varlen dimension.

Built from the scheduler's chunks on the host and copied to the device in a few transfers; knows blocks and positions,
refuses to know models.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.plan import Chunk
from kernels.varlen import VarlenBatch


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    block_tables: torch.Tensor  # [seqs, max_blocks] int64
    context_lens: torch.Tensor  # [seqs] int64
    max_context_len: int


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64
    num_decodes: int  # the first tokens, one per sequence
    decode: DecodeBatch | None
    prefill: VarlenBatch | None
    sampling_rows: torch.Tensor | None  # tokens whose logits choose a next token; None: all of them
    numbers: torch.Tensor | None = (
        None  # [4, seqs], of decodes alone: token ids, positions, slots and context lengths, of which those are views
    )


def build_batch(chunks: SequenceOf[Chunk], block_size: int, device: torch.device) -> Batch:
    """`chunks` as scheduled, decodes first."""
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    prefills = list(chunks[len(decodes) :])
    assert not any(chunk.is_decode for chunk in prefills), "decodes must come before prompt chunks"
    numbers, decode = _decode_batch(decodes, block_size, device) if decodes else (None, None)
    sampling_rows = _sampling_rows(chunks, device)
    if numbers is not None and not prefills:
        token_ids, positions, slots, _ = numbers.unbind()
        return Batch(token_ids, positions, slots, len(decodes), decode, None, sampling_rows, numbers)
    parts = [numbers[:3]] if numbers is not None else []
    prefill = _prefill_batch(prefills)
    for i, chunk in enumerate(prefills):
        ids = torch.tensor(chunk.sequence.token_ids[chunk.start : chunk.end])
        at = torch.arange(chunk.start, chunk.end)
        slots = _slots(prefill.block_tables[i : i + 1], at.unsqueeze(0), block_size).squeeze(0)
        parts.append(torch.stack((ids, at, slots)).to(device))
    token_ids, positions, slots = torch.cat(parts, dim=1).unbind()
    return Batch(
        token_ids,
        positions,
        slots,
        num_decodes=len(decodes),
        decode=decode,
        prefill=prefill._replace(
            block_tables=prefill.block_tables.to(device),
            cu_seqlens_q=prefill.cu_seqlens_q.to(device),
            context_lens=prefill.context_lens.to(device),
        ),
        sampling_rows=sampling_rows,
    )


def _decode_batch(chunks: SequenceOf[Chunk], block_size: int, device: torch.device) -> tuple[torch.Tensor, DecodeBatch]:
    """Its numbers, [4, seqs] as in Batch, and the rest. All of it is one transfer, and few operations of torch's: behind a step that has read the
    whole model, each finds the caches empty and takes 10 us."""
    seqs, starts = len(chunks), [chunk.start for chunk in chunks]
    flat = array("q", [chunk.sequence.token_ids[chunk.start] for chunk in chunks])
    flat.extend(starts)
    flat.extend(
        [
            chunk.sequence.block_table[start // block_size] * block_size + start % block_size
            for chunk, start in zip(chunks, starts, strict=True)
        ]
    )
    flat.extend([start + 1 for start in starts])
    longest = _extend_by_tables(flat, chunks)
    there = torch.frombuffer(flat, dtype=torch.int64).to(device)
    numbers, tables = there[: 4 * seqs].view(4, seqs), there[4 * seqs :].view(seqs, longest)
    return numbers, DecodeBatch(tables, numbers[3], max(starts) + 1)


def _prefill_batch(chunks: SequenceOf[Chunk]) -> VarlenBatch:
    q_lens = [chunk.length for chunk in chunks]
    context_lens = [chunk.end for chunk in chunks]
    return VarlenBatch(
        block_tables=_block_tables(chunks),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        host_q_lens=tuple(q_lens),
        host_context_lens=tuple(context_lens),
    )


def _block_tables(chunks: SequenceOf[Chunk]) -> torch.Tensor:
    flat = array("q")  # torch reads nested lists number by number: 1.7 ms for 64 tables of 250 blocks
    longest = _extend_by_tables(flat, chunks)
    return torch.frombuffer(flat, dtype=torch.int64).view(len(chunks), longest)


def _extend_by_tables(flat: "array[int]", chunks: SequenceOf[Chunk]) -> int:
    """By a row for each, as long as the longest."""
    tables = [chunk.sequence.block_table for chunk in chunks]
    longest = max(map(len, tables))
    for table in tables:
        flat.extend(table)
        # Padded with the sequence's own first block: whatever it holds is finite, and attention masks it.
        flat.extend(table[:1] * (longest - len(table)))
    return longest


def _slots(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """block_tables [seqs, max_blocks], positions [seqs, n] -> slots [seqs, n]"""
    return block_tables.gather(1, positions // block_size) * block_size + positions % block_size


def _sampling_rows(chunks: SequenceOf[Chunk], device: torch.device) -> torch.Tensor | None:
    if all(chunk.length == 1 and chunk.samples for chunk in chunks):
        return None
    ends = accumulate(chunk.length for chunk in chunks)
    rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
    return torch.tensor(rows, dtype=torch.int64).to(device)
