"""Paged causal attention of prompt chunks on Hopper (FlashAttention-3's overlap within a warp group, Shah et al., 2024): the scores of the next tile
of keys are multiplied while those of this one become weights.

Triton waits for a product before anything that follows it, so that its form (kernels/triton/prefill_attention.py), which takes what this one refuses,
leaves the tensor cores idle while it takes exponents, and they take half as long as both products.
"""

import torch
import triton.language as tl

from kernels.attention_rule import AttentionRule
from kernels.triton.decode_attention import capped
from kernels.triton.gluon import async_copy, fence_async_shared, gl, warpgroup_mma, warpgroup_mma_wait
from kernels.triton.jit import jit
from kernels.triton.launch import is_hopper
from kernels.triton.paged_tiles import LOG2_E, NO_WINDOW, first_seen, tanh, weigh, window_kind
from kernels.triton.varlen import sequence_of
from kernels.varlen import VarlenBatch

_OF_BATCH = ("tables", "starts", "lens", "tables_seq", "window", "seqs", "tiles")  # as decode_attention's
_ROWS, _WARPS = 128, 8  # two warp groups of 64 queries
# Keys of a tile by the width of a head: scores of two tiles and sums are 160 to 192 registers a thread; queries, two tiles of keys and three of
# values are 96, 192 and 224 KiB of shared memory.
_TILES = {64: 128, 128: 128, 256: 64}
_VALUES = 3


@jit(of_batch=_OF_BATCH, is_gluon=True)
def _attend(
    q, k_cache, v_cache, tables, starts, lens, sinks, out,
    q_token, q_head, cache_block, cache_offset, cache_head, tables_seq,
    scale, cap, window, heads, group, seqs, tiles,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    WARPS: tl.constexpr = gl.num_warps()
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    LOADED: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    SHARED: tl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Heads that share keys run side by side; a sequence's last tile, which sees most, runs first.
    head = tl.program_id(0) % heads
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
    seq, tile = sequence_of(tiles - 1 - tl.program_id(0) // heads, starts, seqs, 1, lanes, ROWS)
    first = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - first
    if tile * ROWS < num_queries:
        dtype: tl.constexpr = q.dtype.element_ty
        queries = gl.allocate_shared_memory(dtype, [ROWS, DIM], SHARED)
        keys = gl.allocate_shared_memory(dtype, [2, TILE, DIM], SHARED)
        values = gl.allocate_shared_memory(dtype, [VALUES, TILE, DIM], SHARED)
        context = tl.load(lens + seq).to(tl.int32)
        prefix = context - num_queries + tile * ROWS  # tokens before the first query
        end = tl.minimum(context, prefix + ROWS)
        begin, first_block, all_seen = 0, 0, 0
        if WINDOW != NO_WINDOW:
            edge = first_seen(prefix, window, WINDOW)
            begin = edge // TILE * TILE
            first_block = edge // BLOCK_SIZE  # what lies before it may be another's by now: it is not read
            all_seen = first_seen(prefix + ROWS - 1, window, WINDOW)
        last_block = (end - 1) // BLOCK_SIZE
        table = tables + seq.to(tl.int64) * tables_seq
        key, column = gl.arange(0, TILE, gl.SliceLayout(1, LOADED)), gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
        inside = (key % BLOCK_SIZE * cache_offset)[:, None] + column[None, :]
        k, v = k_cache + head // group * cache_head, v_cache + head // group * cache_head
        # Two tiles are on their way before the queries are read; the blocks of a third are known.
        for number in gl.static_range(2):
            block = _block(table, begin + number * TILE, key, first_block, last_block, BLOCK_SIZE)
            place = (block.to(tl.int64) * cache_block)[:, None] + inside
            async_copy.async_copy_global_to_shared(keys.index(number), k + place)
            async_copy.async_copy_global_to_shared(values.index(number), v + place)
            async_copy.commit_group()
        block = _block(table, begin + 2 * TILE, key, first_block, last_block, BLOCK_SIZE)
        query = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        token = (first + query).to(tl.int64)
        rows = q + token[:, None] * q_token + head * q_head + column[None, :]
        queries.store(tl.load(rows, mask=(query < num_queries)[:, None], other=0.0))
        fence_async_shared()
        at = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        # Rows beyond the queries see what the last one sees.
        position = tl.minimum(prefix + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), end - 1)
        factor = scale
        if HAS_CAP:
            factor = cap
        top = gl.full([ROWS], float("-inf"), tl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([ROWS], 0.0, tl.float32, gl.SliceLayout(1, SCORES))
        result = gl.full([ROWS, DIM], 0.0, tl.float32, SUMS)
        none = gl.full([ROWS, TILE], 0.0, tl.float32, SCORES)
        async_copy.wait_group(1)
        scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        i_keys, i_values = 0, 0  # which buffers are this tile's
        for start in range(begin, end - TILE, TILE):
            async_copy.wait_group(0)  # the next tile is there, and all warps are done with the one before
            following = warpgroup_mma(
                queries, keys.index(1 - i_keys).permute((1, 0)), none, use_acc=False, is_async=True
            )
            place = (block.to(tl.int64) * cache_block)[:, None] + inside
            async_copy.async_copy_global_to_shared(keys.index(i_keys), k + place)
            async_copy.async_copy_global_to_shared(values.index((i_values + 2) % VALUES), v + place)
            async_copy.commit_group()
            block = _block(table, start + 3 * TILE, key, first_block, last_block, BLOCK_SIZE)
            if HAS_CAP:
                scores = tanh(scores * scale)
            if (start + TILE > prefix + 1) | (start < all_seen):
                scores = _masked(scores, start + at, position, window, WINDOW)
            weights, fade, top, total = weigh(scores, factor, top, total, WINDOW != NO_WINDOW)
            weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            result = result * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            result = warpgroup_mma(weights, values.index(i_values), result, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(following,))
            result = warpgroup_mma_wait(0, deps=(result,))
            i_keys, i_values = 1 - i_keys, (i_values + 1) % VALUES
        async_copy.wait_group(0)
        if HAS_CAP:
            scores = tanh(scores * scale)
        scores = _masked(scores, (end - 1) // TILE * TILE + at, position, window, WINDOW)
        weights, fade, top, total = weigh(scores, factor, top, total, WINDOW != NO_WINDOW)
        weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
        result = result * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        result = warpgroup_mma(weights, values.index(i_values), result, is_async=True)
        result = warpgroup_mma_wait(0, deps=(result,))
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
        query = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        line = (first + query).to(tl.int64) * heads + head
        target = out + line[:, None] * DIM + gl.arange(0, DIM, gl.SliceLayout(0, SUMS))[None, :]
        result = result * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
        tl.store(target, result.to(dtype), mask=(query < num_queries)[:, None])


@jit(is_gluon=True)
def _block(table, start, key, first_block, last_block, BLOCK_SIZE: tl.constexpr):
    """-> where the keys of the tile from `start` on lie: their blocks, none but the sequence's own"""
    number = tl.minimum(tl.maximum(start // BLOCK_SIZE + key // BLOCK_SIZE, first_block), last_block)
    return tl.load(table + number).to(tl.int32)


@jit(is_gluon=True)
def _masked(scores, at, position, window, WINDOW: tl.constexpr):
    seen = at[None, :] <= position[:, None]
    if WINDOW != NO_WINDOW:
        seen = seen & (at[None, :] >= first_seen(position, window, WINDOW)[:, None])
    return tl.where(seen, scores, float("-inf"))


def takes(q: torch.Tensor, block_size: int, longest: int, rule: AttentionRule) -> bool:
    """Return whether such calls have a form here: 16-bit values, chunks that fill more than half a tile, whole blocks in a tile."""
    tile = _TILES.get(q.shape[2])
    is_plain = rule.kv_scales is None and q.element_size() == 2
    return tile is not None and is_plain and longest > 64 and tile % block_size == 0 and is_hopper(q.device)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    out: torch.Tensor,
) -> None:
    """Compute as kernels/prefill_attention.py, into `out`."""
    tokens, heads, dim = q.shape
    seqs = len(batch.host_q_lens)
    tiles = tokens // _ROWS + seqs
    scale, cap = capped(rule.scale, rule.soft_cap)
    _attend[(tiles * heads,)](
        q, k_cache, v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, q if rule.sinks is None else rule.sinks, out,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], batch.block_tables.stride(0),
        scale, cap, rule.window or 0, heads, heads // k_cache.shape[2], seqs, tiles,
        DIM=dim, BLOCK_SIZE=k_cache.shape[1], ROWS=_ROWS, TILE=_TILES[dim], VALUES=_VALUES,
        WINDOW=window_kind(rule), HAS_SINKS=rule.sinks is not None, HAS_CAP=rule.soft_cap is not None, num_warps=_WARPS,
    )  # fmt: skip
