"""Paged causal attention of prompt chunks on Hopper, with 128 registers per thread.

So two programs share a processor, and the products of one overlap the exponents of the other. kernels/triton/attention/prefill_attention.py takes the
calls that this form does not.

With so few registers, code compiled from plain Triton waits for each tensor-core instruction before the next, and requests a tile only after the work
on the previous one. A single program that overlaps its own products with its exponents (FlashAttention-3, Shah et al., 2024) was slower still: 4,935
us for 16,384 tokens with 32 heads of 128 on an H100, against 4,629.
"""

import torch
import triton.language as tl

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E, NO_WINDOW, first_seen, weigh, window_kind
from pilotlight.kernels.triton.attention.varlen import sequence_of
from pilotlight.kernels.triton.gluon import async_copy, fence_async_shared, gl, warpgroup_mma, warpgroup_mma_wait
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import is_hopper

_OF_BATCH = ("tables", "starts", "lens", "tables_seq", "window", "seqs", "tiles")  # as in decode_attention
# With these sizes, sums of 128 columns and scores of 64 keys take 96 registers per thread; queries and two tiles of keys and values take 96 KiB of
# shared memory.
ROWS, TILE, WARPS, REGISTERS = 128, 64, 8, 128
_DIMS = (64, 128)


@jit(of_batch=_OF_BATCH, is_gluon=True)
def _attend(
    q, k_cache, v_cache, tables, starts, lens, sinks, out,
    q_token, q_head, cache_block, cache_offset, cache_head, tables_seq,
    scale, window, heads, group, seqs, tiles,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    WARPS: tl.constexpr = gl.num_warps()
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    LOADED: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    SHARED: tl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Heads that share keys run at the same time. A sequence's last tile, which sees the most keys, runs first.
    head = tl.program_id(0) % heads
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
    seq, tile = sequence_of(tiles - 1 - tl.program_id(0) // heads, starts, seqs, 1, lanes, ROWS)
    first = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - first
    if tile * ROWS < num_queries:
        dtype: tl.constexpr = q.dtype.element_ty
        queries = gl.allocate_shared_memory(dtype, [ROWS, DIM], SHARED)
        keys = gl.allocate_shared_memory(dtype, [2, TILE, DIM], SHARED)
        values = gl.allocate_shared_memory(dtype, [2, TILE, DIM], SHARED)
        context = tl.load(lens + seq).to(tl.int32)
        prefix = context - num_queries + tile * ROWS  # tokens before the first query
        end = tl.minimum(context, prefix + ROWS)
        begin, first_block = 0, 0
        if WINDOW != NO_WINDOW:
            edge = first_seen(prefix, window, WINDOW)
            begin = edge // TILE * TILE
            first_block = edge // BLOCK_SIZE  # earlier blocks may belong to another sequence by now: they are not read
        last_block = (end - 1) // BLOCK_SIZE
        table = tables + seq.to(tl.int64) * tables_seq
        key, column = gl.arange(0, TILE, gl.SliceLayout(1, LOADED)), gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
        inside = (key % BLOCK_SIZE * cache_offset)[:, None] + column[None, :]
        k, v = k_cache + head // group * cache_head, v_cache + head // group * cache_head
        # The first tile, and the block numbers of the second one, are requested before the queries are read.
        block = _blocks(table, begin, key, first_block, last_block, BLOCK_SIZE)
        _copy(keys.index(0), values.index(0), k, v, block, cache_block, inside)
        block = _blocks(table, begin + TILE, key, first_block, last_block, BLOCK_SIZE)
        query = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        rows = q + (first + query).to(tl.int64)[:, None] * q_token + head * q_head + column[None, :]
        queries.store(tl.load(rows, mask=(query < num_queries)[:, None], other=0.0))
        fence_async_shared()
        # Rows beyond the last query attend as that query does.
        position = tl.minimum(prefix + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), end - 1)
        top = gl.full([ROWS], float("-inf"), tl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([ROWS], 0.0, tl.float32, gl.SliceLayout(1, SCORES))
        result = gl.full([ROWS, DIM], 0.0, tl.float32, SUMS)
        i = 0  # index of the buffers for the next tile
        whole_end = tl.maximum(begin, (prefix + 1) // TILE * TILE)  # every query sees the keys before this position
        if WINDOW != NO_WINDOW:
            all_seen = first_seen(prefix + ROWS - 1, window, WINDOW)
            # from here on keys are in the window of every query
            whole_begin = tl.minimum((all_seen + TILE - 1) // TILE * TILE, end)
            i, block, top, total, result = _meet(
                i, block, top, total, result, queries, keys, values, k, v, table, key, inside, position,
                begin, whole_begin, first_block, last_block, cache_block, scale, window, SCORES, SUMS, BLOCK_SIZE, ROWS, TILE, True, WINDOW,
            )  # fmt: skip
            begin = whole_begin
            whole_end = tl.maximum(begin, whole_end)
        i, block, top, total, result = _meet(
            i, block, top, total, result, queries, keys, values, k, v, table, key, inside, position,
            begin, whole_end, first_block, last_block, cache_block, scale, window, SCORES, SUMS, BLOCK_SIZE, ROWS, TILE, False, WINDOW,
        )  # fmt: skip
        i, block, top, total, result = _meet(
            i, block, top, total, result, queries, keys, values, k, v, table, key, inside, position,
            whole_end, end, first_block, last_block, cache_block, scale, window, SCORES, SUMS, BLOCK_SIZE, ROWS, TILE, True, WINDOW,
        )  # fmt: skip
        async_copy.wait_group(0)
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
        query = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        line = (first + query).to(tl.int64) * heads + head
        target = out + line[:, None] * DIM + gl.arange(0, DIM, gl.SliceLayout(0, SUMS))[None, :]
        result = result * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
        tl.store(target, result.to(dtype), mask=(query < num_queries)[:, None])


@jit(is_gluon=True)
def _meet(
    i, block, top, total, result, queries, keys, values, k, v, table, key, inside, position,
    begin, end, first_block, last_block, cache_block, scale, window,
    SCORES: tl.constexpr, SUMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles from `begin` to `end`; return i, block, top, total, result.

    The first tile is in buffers `i`, or is being loaded to them; `block` has the cache blocks of the next tile.
    """
    at = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    none = gl.full([ROWS, TILE], 0.0, tl.float32, SCORES)
    for start in range(begin, end, TILE):
        async_copy.wait_group(0)  # this tile is loaded, and all warps have finished the previous one
        # The next tile is requested before the products. If that came after them, the compiler would synchronise the warp groups once more, between
        # exponents and values.
        _copy(keys.index(1 - i), values.index(1 - i), k, v, block, cache_block, inside)
        scores = warpgroup_mma(queries, keys.index(i).permute((1, 0)), none, use_acc=False, is_async=True)
        block = _blocks(table, start + 2 * TILE, key, first_block, last_block, BLOCK_SIZE)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if MASKED:
            seen = (start + at)[None, :] <= position[:, None]
            if WINDOW != NO_WINDOW:
                seen = seen & ((start + at)[None, :] >= first_seen(position, window, WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = weigh(scores, scale, top, total, MASKED)
        weights = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, SUMS, 2))
        result = result * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        result = warpgroup_mma(weights, values.index(i), result, is_async=True)
        result = warpgroup_mma_wait(0, deps=(result,))
        i = 1 - i
    return i, block, top, total, result


@jit(is_gluon=True)
def _blocks(table, start, key, first_block, last_block, BLOCK_SIZE: tl.constexpr):
    """Return the cache blocks of a tile's keys, limited to those of the sequence."""
    number = tl.minimum(tl.maximum(start // BLOCK_SIZE + key // BLOCK_SIZE, first_block), last_block)
    return tl.load(table + number).to(tl.int32)


@jit(is_gluon=True)
def _copy(keys, values, k, v, block, cache_block, inside):
    place = (block.to(tl.int64) * cache_block)[:, None] + inside
    async_copy.async_copy_global_to_shared(keys, k + place)
    async_copy.async_copy_global_to_shared(values, v + place)
    async_copy.commit_group()


def takes(q: torch.Tensor, block_size: int, batch: VarlenBatch, rule: AttentionRule) -> bool:
    """True if this form takes the call.

    It takes 16-bit values, heads of some widths, long chunks whose queries see no later keys, and a whole number of blocks per tile.
    """
    is_plain = rule.kv_scales is None and rule.soft_cap is None and batch.last_visible is None and q.element_size() == 2
    is_long = max(batch.host_q_lens) > ROWS // 2
    return is_plain and is_long and q.shape[2] in _DIMS and TILE % block_size == 0 and is_hopper(q.device)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    out: torch.Tensor,
) -> None:
    """Compute prefill_attention of kernels/attention into `out`."""
    tokens, heads, dim = q.shape
    seqs = len(batch.host_q_lens)
    tiles = tokens // ROWS + seqs
    _attend[(tiles * heads,)](
        q, k_cache, v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, q if rule.sinks is None else rule.sinks, out,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], batch.block_tables.stride(0),
        rule.scale * LOG2_E.value, rule.window or 0, heads, heads // k_cache.shape[2], seqs, tiles,
        DIM=dim, BLOCK_SIZE=k_cache.shape[1], ROWS=ROWS, TILE=TILE,
        WINDOW=window_kind(rule), HAS_SINKS=rule.sinks is not None, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
