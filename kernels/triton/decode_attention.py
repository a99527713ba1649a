"""Paged decode attention: each sequence's keys are split among programs, whose partial results are then put together
(Flash-Decoding, Dao et al., 2023).

The query heads of one kv head are the rows of one small matrix product, so that keys and values are read once. Shapes
alone are compiled in, no length: lengths are read on the device, and only the number of splits depends on what the host
knows of them.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.jit import jit
from kernels.triton.launch import num_processors

_LEAST_SPLIT = 256  # keys: below it a program ends before it has hidden its own start
_TILE = 64  # keys a step


@jit(do_not_specialize=("tables_seq", "split_len", "splits"))
def _attend(
    q, k_cache, v_cache, tables, lens, sinks, out, tops, sums,
    q_seq, q_head, cache_block, cache_offset, cache_head, tables_seq, out_seq, out_head, out_split,
    scale, window, group, head_dim, split_len, splits,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, column, key = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    heads_of = kv_head * group + row
    is_row, is_column = row < group, column < head_dim
    inside = is_row[:, None] & is_column[None, :]
    queries = tl.load(q + seq * q_seq + heads_of[:, None] * q_head + column[None, :], mask=inside, other=0.0)
    context = tl.load(lens + seq)
    begin = split * split_len
    end = tl.minimum(begin + split_len, context)
    seen = 0
    if HAS_WINDOW:
        seen = tl.maximum(context - window, 0)
        begin = tl.maximum(begin, seen // TILE * TILE)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    result = tl.zeros([GROUP, DIM], tl.float32)
    for start in range(begin, end, TILE):
        position = start + key
        is_key = (position < end) & (position >= seen)
        block = tl.load(tables + seq * tables_seq + position // BLOCK_SIZE, mask=is_key, other=0)
        place = block.to(tl.int64) * cache_block + position % BLOCK_SIZE * cache_offset + kv_head * cache_head
        both = is_key[:, None] & is_column[None, :]
        keys = tl.load(k_cache + place[:, None] + column[None, :], mask=both, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a tile of which nothing is seen leaves -inf, and -inf - -inf would be no number
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(v_cache + place[:, None] + column[None, :], mask=both, other=0.0).to(queries.dtype)
        result = result * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        top = new_top
    target = out + seq * out_seq + split * out_split + heads_of[:, None] * out_head + column[None, :]
    if DIRECT:
        if HAS_SINKS:
            sink = tl.load(sinks + heads_of, mask=is_row, other=0.0).to(tl.float32)
            total += tl.exp(sink - top)
        total = tl.where(is_row, total, 1.0)
        tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(target, result, mask=inside)
        note = (seq * tl.num_programs(1) * group + heads_of) * splits + split
        tl.store(tops + note, top, mask=is_row)
        tl.store(sums + note, total, mask=is_row)


@jit(do_not_specialize=("splits",))
def _join(
    parts, tops, sums, sinks, out,
    parts_seq, parts_head, parts_split, out_seq, out_head, heads, head_dim, splits,
    DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, DIM)
    inside = column < head_dim
    note = (seq * heads + head) * splits
    top, total = float("-inf"), 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks + head).to(tl.float32), 1.0
    result = tl.zeros([DIM], tl.float32)
    for split in range(splits):
        its_top, its_total = tl.load(tops + note + split), tl.load(sums + note + split)
        if its_total > 0.0:  # else it lay beyond the context or before the window
            new_top = tl.maximum(top, its_top)
            fade, weight = tl.exp(top - new_top), tl.exp(its_top - new_top)
            part = tl.load(parts + seq * parts_seq + split * parts_split + head * parts_head + column, mask=inside)
            result = result * fade + part * weight
            total = total * fade + its_total * weight
            top = new_top
    tl.store(out + seq * out_seq + head * out_head + column, (result / total).to(out.dtype.element_ty), mask=inside)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As kernels/decode_attention.py; whatever lies in padded positions is never read."""
    seqs, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    assert k_cache.stride() == v_cache.stride(), "keys and values must be strided alike"
    assert q.stride(2) == k_cache.stride(3) == 1, "heads must be contiguous"
    out = torch.empty((seqs, heads, head_dim), dtype=q.dtype, device=q.device)
    if not seqs:
        return out
    splits = num_splits(seqs * kv_heads, min(max_context_len, window or max_context_len), q.device)
    split_len = triton.cdiv(triton.cdiv(max_context_len, splits), _TILE) * _TILE
    if window is not None and window < max_context_len:
        splits = triton.cdiv(max_context_len, split_len)  # a window lies anywhere: those before it end at once
    direct = splits == 1
    parts, notes = out, out
    if not direct:
        parts = torch.empty((splits, seqs, heads, head_dim), dtype=torch.float32, device=q.device).transpose(0, 1)
        notes = torch.empty((2, seqs, heads, splits), dtype=torch.float32, device=q.device)
    strides = (out.stride(0), out.stride(1), 0) if direct else (parts.stride(0), parts.stride(2), parts.stride(1))
    dim = max(16, triton.next_power_of_2(head_dim))
    _attend[(seqs, kv_heads, splits)](
        q, k_cache, v_cache, block_tables, context_lens, q if sinks is None else sinks, parts, notes[0], notes[-1],
        q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0), *strides,
        scale, window or 0, group, head_dim, split_len, splits,
        BLOCK_SIZE=k_cache.shape[1], GROUP=max(16, triton.next_power_of_2(group)), DIM=dim, TILE=_TILE,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, DIRECT=direct, num_warps=4, num_stages=3,
    )  # fmt: skip
    if not direct:
        _join[(seqs, heads)](
            parts, notes[0], notes[1], q if sinks is None else sinks, out,
            *strides[:2], strides[2], out.stride(0), out.stride(1), heads, head_dim, splits,
            DIM=dim, HAS_SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


def num_splits(programs: int, keys: int, device: torch.device) -> int:
    """Enough programs for two on every processor, none with fewer than 256 keys."""
    wanted = triton.cdiv(2 * num_processors(device), programs)
    return max(1, min(wanted, triton.cdiv(keys, _LEAST_SPLIT)))
