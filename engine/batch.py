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
from engine.transfer import to_device
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
    """Build the batch of a step's `chunks`, decodes first. One transfer for decodes, one for prompts, and no wait for the device."""
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    prefills = list(chunks[len(decodes) :])
    assert not any(chunk.is_decode for chunk in prefills), "decodes must come before prompt chunks"
    rows = _sampling_rows(chunks)
    if not prefills:
        numbers, alone, rows_there = _decode_batch(decodes, rows or [], block_size, device)
        token_ids, positions, slots, _ = numbers.unbind()
        sampling_rows = None if rows is None else rows_there
        return Batch(token_ids, positions, slots, len(decodes), alone, None, sampling_rows, numbers)
    numbers, prefill, rows_there = _prefill_batch(prefills, rows or [], block_size, device)
    decode: DecodeBatch | None = None
    if decodes:
        before, decode, _ = _decode_batch(decodes, [], block_size, device)
        numbers = torch.cat((before[:3], numbers), dim=1)
    token_ids, positions, slots = numbers.unbind()
    return Batch(token_ids, positions, slots, len(decodes), decode, prefill, None if rows is None else rows_there)


def _decode_batch(
    chunks: SequenceOf[Chunk], rows: list[int], block_size: int, device: torch.device
) -> tuple[torch.Tensor, DecodeBatch, torch.Tensor]:
    """Return its numbers, [4, seqs] as in Batch, the rest, and `rows` there. All of it is one transfer, and few operations of torch's: behind a step
    that has read the whole model, each finds the caches empty and takes 10 us."""
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
    flat.extend(rows)
    there = to_device(torch.frombuffer(flat, dtype=torch.int64), device)
    end = (4 + longest) * seqs
    numbers, tables = there[: 4 * seqs].view(4, seqs), there[4 * seqs : end].view(seqs, longest)
    return numbers, DecodeBatch(tables, numbers[3], max(starts) + 1), there[end:]


def _prefill_batch(
    chunks: SequenceOf[Chunk], rows: list[int], block_size: int, device: torch.device
) -> tuple[torch.Tensor, VarlenBatch, torch.Tensor]:
    """Return its token ids, positions and slots, [3, tokens], the rest, and `rows` there, by one transfer too."""
    q_lens = [chunk.length for chunk in chunks]
    context_lens = [chunk.end for chunk in chunks]
    tables = _block_tables(chunks)
    ids = [torch.tensor(chunk.sequence.token_ids[chunk.start : chunk.end]) for chunk in chunks]
    places = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    slots = [_slots(table, at, block_size) for table, at in zip(tables, places, strict=True)]
    parts = [  # tables first: a kernel is compiled anew for one that starts at no multiple of 16 bytes
        tables.view(-1), *ids, *places, *slots, torch.tensor([0, *accumulate(q_lens)]), torch.tensor(context_lens),
        torch.tensor(rows, dtype=torch.int64),
    ]  # fmt: skip
    there = to_device(torch.cat(parts), device)
    sizes = [tables.numel(), 3 * sum(q_lens), len(chunks) + 1, len(chunks), len(rows)]
    tables_there, numbers, starts, lens, rows_there = torch.split(there, sizes)
    batch = VarlenBatch(tables_there.view(tables.shape), starts.int(), lens.int(), tuple(q_lens), tuple(context_lens))
    return numbers.view(3, -1), batch, rows_there


def _block_tables(chunks: SequenceOf[Chunk]) -> torch.Tensor:
    flat = array("q")  # torch reads nested lists number by number: 1.7 ms for 64 tables of 250 blocks
    longest = _extend_by_tables(flat, chunks)
    return torch.frombuffer(flat, dtype=torch.int64).view(len(chunks), longest)


def _extend_by_tables(flat: "array[int]", chunks: SequenceOf[Chunk]) -> int:
    """Append a row for each table, as long as the longest."""
    tables = [chunk.sequence.block_table for chunk in chunks]
    longest = max(map(len, tables))
    for table in tables:
        flat.extend(table)
        # Padded with the sequence's own first block: whatever it holds is finite, and attention masks it.
        flat.extend(table[:1] * (longest - len(table)))
    return longest


def _slots(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """block_table [max_blocks], positions [n] -> slots [n]"""
    return block_table[positions // block_size] * block_size + positions % block_size


def _sampling_rows(chunks: SequenceOf[Chunk]) -> list[int] | None:
    """Return the rows that sample; None: all of them."""
    if all(chunk.length == 1 and chunk.samples for chunk in chunks):
        return None
    ends = accumulate(chunk.length for chunk in chunks)
    return [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
