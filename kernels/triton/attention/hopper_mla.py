"""Latent attention on Hopper: 64 (query, head) pairs attend to tiles of 64 latent vectors.

A tile is in shared memory once, as keys and as values, while the next is being loaded. Each warp group holds the scores of half the keys and the sums
of half the columns. The form in plain Triton (kernels/triton/attention/mla.py) takes the other calls. There both warp groups compute all scores, and
the next tile is requested only after this one: on an H100, with 128 heads over 64 contexts of 8,192, it takes 554 us with the same tiles, and this
form 339.
"""

import torch
import triton.language as tl

from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E
from pilotlight.kernels.triton.attention.split_kv import Splits, keys_of, write_part
from pilotlight.kernels.triton.attention.varlen import sequence_of
from pilotlight.kernels.triton.gluon import async_copy, fence_async_shared, gl, warpgroup_mma, warpgroup_mma_wait
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import is_hopper

_OF_BATCH = ("tables", "starts", "lens", "tables_seq", "seqs", "tiles", "splits")  # as in decode_attention
# With these sizes, queries, two tiles of keys, and the weights that warp groups exchange fill 220 of 227 KiB of shared memory. Sums take 128
# registers per thread.
ROWS, _TILE, _WARPS = 64, 64, 8
_LATENT, _ROTARY = (64, 128, 256, 512), (64,)


@jit(of_batch=_OF_BATCH, is_gluon=True)
def _attend(
    q_latent, q_rotary, cache, tables, starts, lens, out, tops, sums,
    latent_token, latent_head, rotary_token, rotary_head, cache_block, cache_offset, tables_seq,
    scale, heads, seqs, tiles, splits,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, IS_PREFILL: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    WARPS: tl.constexpr = gl.num_warps()
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, TILE * 4 // WARPS, 16])
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, LATENT * 4 // WARPS, 16])
    LOADED: tl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // min(LATENT, 256), min(LATENT, 256) // 8], [WARPS, 1], [1, 0]
    )
    TURNED: tl.constexpr = gl.BlockedLayout([1, 8], [256 // ROTARY, ROTARY // 8], [WARPS, 1], [1, 0])
    SHARED: tl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    program = tl.program_id(0)
    if IS_PREFILL:
        lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        seq, tile = sequence_of(tiles - 1 - program, starts, seqs, heads, lanes, ROWS)
        first = tl.load(starts + seq)
        num_queries, split_index = tl.load(starts + seq + 1) - first, 0
    else:  # the heads of one sequence have adjacent tiles
        tile, split_index, seq = program % tiles, program // tiles % splits, program // tiles // splits
        first, num_queries = seq, 1
    if tile * ROWS < num_queries * heads:
        dtype: tl.constexpr = cache.dtype.element_ty
        queries = gl.allocate_shared_memory(dtype, [ROWS, LATENT], SHARED)
        turned_queries = gl.allocate_shared_memory(dtype, [ROWS, ROTARY], SHARED)
        keys = gl.allocate_shared_memory(dtype, [2, TILE, LATENT], SHARED)
        turned_keys = gl.allocate_shared_memory(dtype, [2, TILE, ROTARY], SHARED)
        context = tl.load(lens + seq).to(tl.int32)
        last = context - num_queries + (tile * ROWS + ROWS - 1) // heads  # position of the tile's last query
        begin, end = keys_of(split_index, splits, 0, tl.minimum(context, last + 1), TILE)
        table = tables + seq.to(tl.int64) * tables_seq
        last_block = (end - 1) // BLOCK_SIZE
        latent, rotary = (
            gl.arange(0, LATENT, gl.SliceLayout(0, LOADED)),
            gl.arange(0, ROTARY, gl.SliceLayout(0, TURNED)),
        )
        key, turned_key = gl.arange(0, TILE, gl.SliceLayout(1, LOADED)), gl.arange(0, TILE, gl.SliceLayout(1, TURNED))
        inside = (key % BLOCK_SIZE * cache_offset)[:, None] + latent[None, :]
        turned_inside = (turned_key % BLOCK_SIZE * cache_offset)[:, None] + rotary[None, :] + LATENT
        block = _block(table, begin, key, last_block, BLOCK_SIZE)
        turned_block = _block(table, begin, turned_key, last_block, BLOCK_SIZE)
        _copy(keys.index(0), cache, block, cache_block, inside)
        _copy(turned_keys.index(0), cache, turned_block, cache_block, turned_inside)
        async_copy.commit_group()
        block = _block(table, begin + TILE, key, last_block, BLOCK_SIZE)
        turned_block = _block(table, begin + TILE, turned_key, last_block, BLOCK_SIZE)

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
        place = (first + row // heads).to(tl.int64) * latent_token + row % heads * latent_head
        is_row = (row // heads < num_queries)[:, None]
        queries.store(tl.load(q_latent + place[:, None] + latent[None, :], mask=is_row, other=0.0))
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, TURNED))
        place = (first + row // heads).to(tl.int64) * rotary_token + row % heads * rotary_head
        is_row = (row // heads < num_queries)[:, None]
        turned_queries.store(tl.load(q_rotary + place[:, None] + rotary[None, :], mask=is_row, other=0.0))
        fence_async_shared()

        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        position = tl.minimum(context - num_queries + row // heads, end - 1)
        at = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        top = gl.full([ROWS], float("-inf"), tl.float32, gl.SliceLayout(1, SCORES))
        totals = gl.full(
            [ROWS, TILE], 0.0, tl.float32, SCORES
        )  # the totals of each warp group, which are added once, at the end
        result = gl.full([ROWS, LATENT], 0.0, tl.float32, SUMS)
        none = gl.full([ROWS, TILE], 0.0, tl.float32, SCORES)
        i = 0  # index of the buffers that hold this tile
        for start in range(begin, end, TILE):
            async_copy.wait_group(0)
            scores = warpgroup_mma(queries, keys.index(i).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma(turned_queries, turned_keys.index(i).permute((1, 0)), scores, is_async=True)
            _copy(keys.index(1 - i), cache, block, cache_block, inside)
            _copy(turned_keys.index(1 - i), cache, turned_block, cache_block, turned_inside)
            async_copy.commit_group()
            block = _block(table, start + 2 * TILE, key, last_block, BLOCK_SIZE)
            turned_block = _block(table, start + 2 * TILE, turned_key, last_block, BLOCK_SIZE)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = tl.where((start + at)[None, :] <= position[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # for rows that have seen no key
            weights = tl.exp2(scores * scale - shift[:, None])
            fade = tl.exp2(top - shift)
            top = new_top
            totals = totals * fade[:, None] + weights
            weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            result = result * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            result = warpgroup_mma(weights, keys.index(i), result, is_async=True)
            result = warpgroup_mma_wait(0, deps=(result,))
            i = 1 - i
        async_copy.wait_group(0)
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        line = (first + row // heads).to(tl.int64) * heads + row % heads
        top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
        total = gl.convert_layout(tl.sum(totals, axis=1), gl.SliceLayout(1, SUMS))
        column = gl.arange(0, LATENT, gl.SliceLayout(0, SUMS))
        write_part(
            out, tops, sums, out, line, line, row // heads < num_queries, top, total, result, 1.0, split_index, splits, column,
            LATENT, LATENT, False, DIRECT,
        )  # fmt: skip


@jit(is_gluon=True)
def _block(table, start, key, last_block, BLOCK_SIZE: tl.constexpr):
    """Return the cache blocks of a tile's keys, limited to the sequence's last block."""
    return tl.load(table + tl.minimum(start // BLOCK_SIZE + key // BLOCK_SIZE, last_block)).to(tl.int32)


@jit(is_gluon=True)
def _copy(buffer, cache, block, cache_block, inside):
    async_copy.async_copy_global_to_shared(buffer, cache + ((block.to(tl.int64) * cache_block)[:, None] + inside))


def takes(q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor) -> bool:
    """True if this form takes the call: 16-bit values of some sizes, and whole blocks in a tile."""
    has_form = q_latent.shape[2] in _LATENT and q_rotary.shape[2] in _ROTARY and q_latent.element_size() == 2
    return has_form and cache.dtype == q_latent.dtype and _TILE % cache.shape[1] == 0 and is_hopper(q_latent.device)


def attend(
    programs: int,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    context_lens: torch.Tensor,
    splits: Splits,
    scale: float,
    seqs: int,
    tiles: int,
    is_prefill: bool,
) -> None:
    """Launch the kernel. `_launch` in kernels/triton/attention/mla.py calls this with its own arguments."""
    _, heads, latent = q_latent.shape
    _attend[(programs,)](
        q_latent, q_rotary, cache, block_tables, starts, context_lens, splits.parts, splits.tops, splits.sums,
        *q_latent.stride()[:2], *q_rotary.stride()[:2], *cache.stride()[:2], block_tables.stride(0),
        scale * LOG2_E.value, heads, seqs, tiles, splits.number,
        LATENT=latent, ROTARY=q_rotary.shape[2], BLOCK_SIZE=cache.shape[1], ROWS=ROWS, TILE=_TILE,
        IS_PREFILL=is_prefill, DIRECT=splits.number == 1, num_warps=_WARPS,
    )  # fmt: skip
