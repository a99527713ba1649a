"""Paged causal attention of prompt chunks over their cached prefix, one program per tile and head.

The tiling is FlashAttention-2's (Dao, 2023). Only tiles of keys on the diagonal or at a window's edge are masked. One launch serves a batch of
unequal chunks; the tiles that see most keys run first.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.triton.attention import hopper_prefill
from pilotlight.kernels.triton.attention.decode_attention import capped
from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E, NO_WINDOW, first_seen, meet, window_kind
from pilotlight.kernels.triton.attention.varlen import sequence_of
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion

_OF_BATCH = (
    "tables",
    "starts",
    "lens",
    "last_visible",
    "tables_seq",
    "window",
    "seqs",
    "tiles",
)  # as in decode_attention


@jit(of_batch=_OF_BATCH)
def _attend(
    q, k_cache, v_cache, tables, starts, lens, last_visible, sinks, kv_scales, out,
    q_token, q_head, cache_block, cache_offset, cache_head, tables_seq,
    scale, cap, window, heads, group, seqs, tiles,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr, SEES_AHEAD: tl.constexpr,
):  # fmt: skip
    # Heads that share keys run at the same time. A sequence's last tile, which sees the most keys, runs first.
    head = tl.program_id(0) % heads
    seq, tile = sequence_of(tiles - 1 - tl.program_id(0) // heads, starts, seqs, 1, tl.arange(0, 128), ROWS)
    first = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - first
    if tile * ROWS < num_queries:
        column = tl.arange(0, DIM)
        query = tile * ROWS + tl.arange(0, ROWS)
        inside = (query < num_queries)[:, None]
        if HEAD_DIM < DIM:
            inside = inside & (column < HEAD_DIM)[None, :]
        token = (first + query).to(tl.int64)
        rows = tl.load(q + token[:, None] * q_token + head * q_head + column[None, :], mask=inside, other=0.0)
        context = tl.load(lens + seq).to(tl.int32)
        prefix = context - num_queries + tile * ROWS  # tokens before the first query
        position = context - num_queries + query
        last_seen, end = position, tl.minimum(context, prefix + ROWS)
        if SEES_AHEAD:
            last_seen = tl.maximum(position, tl.load(last_visible + first + query, mask=query < num_queries, other=0))
            end = tl.minimum(context, tl.maximum(end, tl.max(last_seen, axis=0) + 1))
        whole_end = (prefix + 1) // TILE * TILE  # every query sees the keys before this position
        begin = 0
        factor = 1.0
        if FP8:
            scale = scale * tl.load(kv_scales)
            factor = tl.load(kv_scales + 1)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        table = tables + seq.to(tl.int64) * tables_seq
        if WINDOW != NO_WINDOW:
            edge = first_seen(prefix, window, WINDOW)
            last = first_seen(prefix + ROWS - 1, window, WINDOW)
            begin = (last + TILE - 1) // TILE * TILE  # from here on keys are in the window of every query
            top, total, result = meet(
                rows, position, last_seen, top, total, result,
                k_cache, v_cache, table, head // group, cache_block, cache_offset, cache_head,
                edge, edge // TILE * TILE, tl.minimum(begin, end), scale, cap, window,
                HEAD_DIM, DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP, FP8,
            )  # fmt: skip
            whole_end = tl.maximum(begin, whole_end)
        top, total, result = meet(
            rows, position, last_seen, top, total, result,
            k_cache, v_cache, table, head // group, cache_block, cache_offset, cache_head,
            begin, begin, whole_end, scale, cap, window,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, False, WINDOW, HAS_CAP, FP8,
        )  # fmt: skip
        top, total, result = meet(
            rows, position, last_seen, top, total, result,
            k_cache, v_cache, table, head // group, cache_block, cache_offset, cache_head,
            whole_end, whole_end, end, scale, cap, window,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP, FP8,
        )  # fmt: skip
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
        total = tl.where(total > 0.0, total, 1.0)  # rows beyond the last query may have seen no key
        target = out + (token * heads + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, (result * (factor / total)[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Compute prefill_attention of kernels/attention."""
    scale, window, sinks, soft_cap, kv_scales, _ = rule
    tokens, heads, head_dim = q.shape
    assert k_cache.stride() == v_cache.stride(), "caches of keys and values must have equal strides"
    assert q.stride(2) == k_cache.stride(3) == 1, "heads must be contiguous"
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if hopper_prefill.takes(q, k_cache.shape[1], batch, rule):
        hopper_prefill.prefill_attention(q, k_cache, v_cache, batch, rule, out)
        return out
    dim = max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps, stages = tiling(dim, max(batch.host_q_lens), q.element_size())
    seqs = len(batch.host_q_lens)
    tiles = tokens // rows + seqs
    scale, cap = capped(scale, soft_cap)
    _attend[(tiles * heads,)](
        q, as_bytes(k_cache), as_bytes(v_cache), batch.block_tables, batch.cu_seqlens_q, batch.context_lens,
        batch.cu_seqlens_q if batch.last_visible is None else batch.last_visible,
        q if sinks is None else sinks, q if kv_scales is None else kv_scales, out,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], batch.block_tables.stride(0),
        scale, cap, window or 0, heads, heads // k_cache.shape[2], seqs, tiles,
        HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=k_cache.shape[1], ROWS=rows, TILE=tile,
        WINDOW=window_kind(rule), HAS_SINKS=sinks is not None, HAS_CAP=soft_cap is not None,
        FP8=conversion(kv_scales), SEES_AHEAD=batch.last_visible is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def tiling(dim: int, longest: int, bytes_per_value: int) -> tuple[int, int, int, int]:
    """Return queries, keys, warps and stages of a tile: at most three shapes per head width."""
    if bytes_per_value == 4:  # fp32: see decode_attention
        return 16, max(16, min(32, 4096 // dim)), 8, 3
    if longest <= 16:
        return 16, max(16, min(64, 8192 // dim)), 4, 3
    # The block table needs one of three stages, so shared memory holds keys and values of two tiles.
    if dim <= 128:  # two warp groups of 64 rows, 252 registers per thread
        return (128, 128, 8, 3) if longest > 64 else (64, 64, 4, 3)
    return (128, 64, 8, 3) if longest > 64 and dim <= 256 else (64, max(16, 16384 // dim), 8, 3)
