"""Paged causal attention of prompt chunks over their cached prefix (FlashAttention-2's tiling, Dao, 2023): one program per tile of queries, head and
sequence. Tiles beyond a sequence's queries end at once, so that one launch serves a batch of unequal chunks.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.jit import jit
from kernels.varlen import VarlenBatch


@jit(do_not_specialize=("tables_seq",))
def _attend(
    q, k_cache, v_cache, tables, starts, lens, sinks, out,
    q_token, q_head, cache_block, cache_offset, cache_head, tables_seq, out_token, out_head,
    scale, window, group, head_dim,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - first
    if tile * ROWS < num_queries:
        row, column, key = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TILE)
        query = tile * ROWS + row
        is_row, is_column = query < num_queries, column < head_dim
        inside = is_row[:, None] & is_column[None, :]
        token = (first + query).to(tl.int64)
        queries = tl.load(q + token[:, None] * q_token + head * q_head + column[None, :], mask=inside, other=0.0)
        context = tl.load(lens + seq)
        position = context - num_queries + query  # of each query
        end = tl.minimum(context, context - num_queries + (tile + 1) * ROWS)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(context - num_queries + tile * ROWS - window + 1, 0) // TILE * TILE
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(begin, end, TILE):
            at = start + key
            is_key = at < end
            block = tl.load(tables + seq * tables_seq + at // BLOCK_SIZE, mask=is_key, other=0)
            place = block.to(tl.int64) * cache_block + at % BLOCK_SIZE * cache_offset + head // group * cache_head
            both = is_key[:, None] & is_column[None, :]
            keys = tl.load(k_cache + place[:, None] + column[None, :], mask=both, other=0.0)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
            seen = is_key[None, :] & (at[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(scores - shift[:, None])
            fade = tl.exp(top - shift)
            total = total * fade + tl.sum(weights, axis=1)
            values = tl.load(v_cache + place[:, None] + column[None, :], mask=both, other=0.0).to(queries.dtype)
            result = result * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
            top = new_top
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
        total = tl.where(is_row, total, 1.0)  # rows beyond the queries have seen nothing
        target = out + token[:, None] * out_token + head * out_head + column[None, :]
        tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As kernels/prefill_attention.py."""
    tokens, heads, head_dim = q.shape
    group = heads // k_cache.shape[2]
    assert k_cache.stride() == v_cache.stride(), "keys and values must be strided alike"
    assert q.stride(2) == k_cache.stride(3) == 1, "heads must be contiguous"
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    dim = max(16, triton.next_power_of_2(head_dim))
    rows = 128 if dim <= 128 and max(batch.host_q_lens) > 64 else 64 if max(batch.host_q_lens) > 16 else 16
    grid = (triton.cdiv(max(batch.host_q_lens), rows), heads, len(batch.host_q_lens))
    _attend[grid](
        q, k_cache, v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, q if sinks is None else sinks, out,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], batch.block_tables.stride(0), out.stride(0), out.stride(1),
        scale, window or 0, group, head_dim,
        BLOCK_SIZE=k_cache.shape[1], ROWS=rows, DIM=dim, TILE=64,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, num_warps=8 if rows == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out
