"""Paged attention of the last tokens of each sequence, one (decode) or a few (verify).

Keys and values are read once for all query heads of their kv head and all queries, which are the rows of one small matrix product, and each context
is split among programs. Compiled code depends on shapes and not on lengths: kernels read lengths on the device, and only the number of splits depends
on the longest length that the host knows.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E, NO_WINDOW, first_seen, meet, window_kind
from pilotlight.kernels.triton.attention.split_kv import join, keys_of, split, write_part
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion

# Stages of the loop over tiles; two of them are needed by the block table. While a program in bf16 computes with one tile, two tiles of 16 KiB of
# keys and two of values are being loaded, and three programs fit on a processor. To read 4.8 TB/s at some 800 ns of latency, 132 processors must each
# have 29 KB in flight.
STAGES = 5

# These arguments depend on lengths and batches. Without this list a variant for each kind of value (1, multiples of 16) would be compiled while
# requests wait.
_OF_BATCH = ("tables", "lens", "tables_seq", "window", "queries", "splits")


@jit(of_batch=_OF_BATCH)
def _attend(
    q, k_cache, v_cache, tables, lens, sinks, kv_scales, out, tops, sums,
    q_seq, q_query, q_head, cache_block, cache_offset, cache_head, tables_seq,
    scale, cap, window, queries, group, kv_heads, row_tiles, splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time read adjacent memory: the heads of the same tokens.
    program = tl.program_id(0)
    kv_head, row_tile = program % kv_heads, program // kv_heads % row_tiles
    program = program // (kv_heads * row_tiles)
    split, seq = program % splits, (program // splits).to(tl.int64)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    query, head = row // group, kv_head * group + row % group
    is_row = row < queries * group
    inside = is_row[:, None]
    if HEAD_DIM < DIM:
        inside = inside & (column < HEAD_DIM)[None, :]
    places = seq * q_seq + query * q_query + head * q_head
    rows = tl.load(q + places[:, None] + column[None, :], mask=inside, other=0.0)
    context = tl.load(lens + seq).to(tl.int32)
    first = 0
    if WINDOW != NO_WINDOW:
        first = first_seen(context - queries, window, WINDOW)
    begin, end = keys_of(split, splits, first // TILE * TILE, context, TILE)
    factor = 1.0
    if FP8:
        scale = scale * tl.load(kv_scales)
        factor = tl.load(kv_scales + 1)
    position = context - queries + query
    top, total, result = meet(
        rows, position, position,
        tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32),
        k_cache, v_cache, tables + seq * tables_seq, kv_head, cache_block, cache_offset, cache_head,
        first, begin, end, scale, cap, window, HEAD_DIM, DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP, FP8,
    )  # fmt: skip
    line = (seq * queries + query) * kv_heads * group + head
    write_part(
        out, tops, sums, sinks, line, head, is_row, top, total, result, factor, split, splits, tl.arange(0, DIM),
        HEAD_DIM, DIM, HAS_SINKS, DIRECT,
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """Compute decode_attention of kernels/attention; memory of padded positions is never read."""
    return attend(q[:, None], k_cache, v_cache, block_tables, context_lens, max_context_len, rule)[:, 0]


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attend from q [seqs, queries, heads, head_dim]; return the same shape, contiguous."""
    scale, window, sinks, soft_cap, kv_scales, _ = rule
    seqs, queries, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    assert k_cache.stride() == v_cache.stride(), "caches of keys and values must have equal strides"
    assert q.stride(3) == k_cache.stride(3) == 1, "heads must be contiguous"
    out = torch.empty((seqs, queries, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    dim = max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps = tiling(dim, queries * group, q.element_size())
    row_tiles = triton.cdiv(queries * group, rows)
    programs = seqs * kv_heads * row_tiles
    keys = max_context_len if window is None else min(max_context_len, window + queries - 1 + tile - 1)
    splits = split(out, programs, keys)
    scale, cap = capped(scale, soft_cap)
    _attend[(programs * splits.number,)](
        q, as_bytes(k_cache), as_bytes(v_cache), block_tables, context_lens, q if sinks is None else sinks,
        q if kv_scales is None else kv_scales, splits.parts, splits.tops, splits.sums,
        *q.stride()[:3], *k_cache.stride()[:3], block_tables.stride(0),
        scale, cap, window or 0, queries, group, kv_heads, row_tiles, splits.number,
        HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=k_cache.shape[1], ROWS=rows, TILE=tile,
        WINDOW=window_kind(rule), HAS_SINKS=sinks is not None, HAS_CAP=soft_cap is not None,
        FP8=conversion(kv_scales), DIRECT=splits.number == 1, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    join(splits, sinks, heads, out)
    return out


def tiling(dim: int, wanted_rows: int, bytes_per_value: int) -> tuple[int, int, int]:
    """Return rows, keys and warps of a tile, by the type of the queries."""
    # products in ieee precision use no tensor cores, and more rows or fewer warps would spill registers
    if bytes_per_value == 4:
        return 16, max(16, min(64, 4096 // dim)), 8
    return min(64, max(16, triton.next_power_of_2(wanted_rows))), max(16, min(128, 8192 // dim)), 4


def capped(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the factors of a dot product and of its tanh (0 without a cap); scores are exponents of two."""
    if soft_cap is None:
        return scale * LOG2_E.value, 0.0
    return scale / soft_cap, soft_cap * LOG2_E.value
