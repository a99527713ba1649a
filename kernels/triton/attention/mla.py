"""Latent attention in absorbed form: the cache's write, decode and prefill.

A row is a (query, head) pair, because all heads attend to the same latent vectors, which are read once for keys and values. Decode splits each
context among programs.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.attention.selected_rows import copied
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.triton.attention import hopper_mla
from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E, load_rows, weigh
from pilotlight.kernels.triton.attention.split_kv import Splits, join, keys_of, split, write_part
from pilotlight.kernels.triton.attention.varlen import sequence_of
from pilotlight.kernels.triton.elementwise.kv_write import place_of
from pilotlight.kernels.triton.elementwise.rotary import load_pairs, turn
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion, decode_fp8, encode_fp8

_OF_BATCH = ("tables", "starts", "lens", "tables_seq", "seqs", "tiles", "splits")  # as in decode_attention


@jit(of_batch=_OF_BATCH)
def _attend(
    q_latent, q_rotary, cache, cache_scale, tables, starts, lens, out, tops, sums,
    latent_token, latent_head, rotary_token, rotary_head, cache_block, cache_offset, tables_seq,
    scale, heads, seqs, tiles, splits,
    LATENT: tl.constexpr, LATENT_DIM: tl.constexpr, ROTARY: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr, IS_PREFILL: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if IS_PREFILL:
        seq, tile = sequence_of(tiles - 1 - program, starts, seqs, heads, tl.arange(0, 128), ROWS)
        first = tl.load(starts + seq)
        num_queries, split_index = tl.load(starts + seq + 1) - first, 0
    else:  # the heads of one sequence have adjacent tiles
        tile, split_index, seq = program % tiles, program // tiles % splits, program // tiles // splits
        first, num_queries = seq, 1
    if tile * ROWS < num_queries * heads:
        row = tile * ROWS + tl.arange(0, ROWS)
        query, head = row // heads, row % heads
        is_row = query < num_queries
        latent, rotary = tl.arange(0, LATENT_DIM), tl.arange(0, ROTARY_DIM)
        token = (first + query).to(tl.int64)
        rows = tl.load(
            q_latent + (token * latent_token + head * latent_head)[:, None] + latent[None, :],
            mask=is_row[:, None] & (latent < LATENT)[None, :], other=0.0,
        )  # fmt: skip
        turned_rows = tl.load(
            q_rotary + (token * rotary_token + head * rotary_head)[:, None] + rotary[None, :],
            mask=is_row[:, None] & (rotary < ROTARY)[None, :], other=0.0,
        )  # fmt: skip
        factor = 1.0
        if FP8:
            factor = tl.load(cache_scale)
            scale *= factor
        context = tl.load(lens + seq).to(tl.int32)
        last = context - num_queries + (tile * ROWS + ROWS - 1) // heads  # position of the tile's last query
        begin, end = keys_of(split_index, splits, 0, tl.minimum(context, last + 1), TILE)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, LATENT_DIM], tl.float32)
        table = tables + seq.to(tl.int64) * tables_seq
        # A single loop masks all tiles. With a second loop for fully visible tiles, ptxas spills 284 bytes per thread for sm_90, and 52 without.
        for start in range(begin, end, TILE):
            at = start + tl.arange(0, TILE)
            is_key = at < end
            block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0)
            place = (block.to(tl.int64) * cache_block + at % BLOCK_SIZE * cache_offset)[:, None]
            shared = load_rows(cache, place + latent[None, :], is_key, latent, LATENT, LATENT_DIM, True)
            turned = load_rows(cache + LATENT, place + rotary[None, :], is_key, rotary, ROTARY, ROTARY_DIM, True)
            if FP8:
                shared, turned = decode_fp8(shared, FP8).to(rows.dtype), decode_fp8(turned, FP8).to(rows.dtype)
            scores = tl.dot(rows, tl.trans(shared), input_precision="ieee")
            scores = tl.dot(turned_rows, tl.trans(turned), scores, input_precision="ieee")
            seen = at[None, :] <= (context - num_queries + query)[:, None]
            weights, fade, top, total = weigh(tl.where(seen, scores, float("-inf")), scale, top, total, True)
            result = tl.dot(weights.to(shared.dtype), shared, result * fade[:, None], input_precision="ieee")
        write_part(
            out, tops, sums, out, token * heads + head, head, is_row, top, total, result, factor, split_index, splits, latent,
            LATENT, LATENT_DIM, False, DIRECT,
        )  # fmt: skip


@jit(of_batch=("slots",))
def _write(
    x, norm, cos, sin, cache, cache_scale, slots, x_token, cos_token, sin_token, cache_block, cache_offset, eps,
    LATENT: tl.constexpr, LATENT_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, pair = tl.arange(0, LATENT_DIM), tl.arange(0, PAIRS)
    inside, is_pair = column < LATENT, pair < HALF
    place = cache + place_of(slots, token, cache_block, cache_offset, BLOCK_SIZE)
    row = tl.load(x + token * x_token + column, mask=inside, other=0.0)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
    factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * scale * factor).to(row.dtype)
    first, second = load_pairs(x + token * x_token + LATENT, pair, HALF, is_pair, True)
    c = tl.load(cos + token * cos_token + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + token * sin_token + pair, mask=is_pair, other=0.0)
    turned_first, turned_second = turn(first.to(tl.float32), second.to(tl.float32), c, s)
    turned_first, turned_second = turned_first.to(row.dtype), turned_second.to(row.dtype)
    if FP8:
        by = tl.load(cache_scale)
        normed = encode_fp8(normed.to(tl.float32) / by, FP8)
        turned_first = encode_fp8(turned_first.to(tl.float32) / by, FP8)
        turned_second = encode_fp8(turned_second.to(tl.float32) / by, FP8)
    tl.store(place + column, normed, mask=inside)
    tl.store(place + LATENT + pair, turned_first, mask=is_pair)
    tl.store(place + LATENT + HALF + pair, turned_second, mask=is_pair)


def mla_write(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Compute mla_write of kernels/attention/mla.py."""
    tokens, latent, half = x.shape[0], norm.shape[0], cos.shape[1]
    if tokens:
        _write[(tokens,)](
            x, norm, cos, sin, as_bytes(cache), x if cache_scale is None else cache_scale, slot_mapping,
            x.stride(0), cos.stride(0), sin.stride(0), *cache.stride()[:2], eps,
            LATENT=latent, LATENT_DIM=triton.next_power_of_2(latent), HALF=half, PAIRS=triton.next_power_of_2(half),
            BLOCK_SIZE=cache.shape[1], FP8=conversion(cache_scale), num_warps=2,
        )  # fmt: skip


def mla_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute mla_decode of kernels/attention/mla.py; memory of padded positions is never read."""
    seqs, heads, _ = q_latent.shape
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if not out.numel():
        return out
    rows = _rows(heads, q_latent, q_rotary, cache)
    tiles = triton.cdiv(heads, rows)
    splits = split(out, seqs * tiles, max_context_len, hopper_mla.takes(q_latent, q_rotary, cache))
    programs = seqs * tiles * splits.number
    _launch(
        programs,
        q_latent,
        q_rotary,
        cache,
        cache_scale,
        block_tables,
        context_lens,
        context_lens,
        splits,
        scale,
        seqs,
        tiles,
        rows,
        False,
    )
    join(splits, None, heads, out)
    return out


def mla_prefill(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute mla_prefill of kernels/attention/mla.py."""
    tokens, heads, _ = q_latent.shape
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if not out.numel():
        return out
    tables, starts, lens = batch[:3]
    rows = _rows(max(batch.host_q_lens) * heads, q_latent, q_rotary, cache)
    seqs = len(batch.host_q_lens)
    tiles = tokens * heads // rows + seqs
    whole = Splits(1, out, out, out)
    _launch(tiles, q_latent, q_rotary, cache, cache_scale, tables, starts, lens, whole, scale, seqs, tiles, rows, True)
    return out


def mla_selected(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    num_read: torch.Tensor,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute mla_selected of kernels/attention/mla.py, over copies of the vectors, which all forms take."""
    there = copied(cache, block_tables, positions, num_read, q_latent.dtype, cache_scale)
    return mla_decode(q_latent, q_rotary, *there, scale)


def _launch(
    programs: int,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    cache_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    context_lens: torch.Tensor,
    splits: Splits,
    scale: float,
    seqs: int,
    tiles: int,
    rows: int,
    is_prefill: bool,
) -> None:
    _, heads, latent = q_latent.shape
    rotary = q_rotary.shape[2]
    assert q_latent.stride(2) == q_rotary.stride(2) == cache.stride(2) == 1, "vectors must be contiguous"
    if hopper_mla.takes(q_latent, q_rotary, cache):
        hopper_mla.attend(
            programs, q_latent, q_rotary, cache, block_tables, starts, context_lens, splits, scale, seqs, tiles, is_prefill
        )  # fmt: skip
        return
    _attend[(programs,)](
        q_latent, q_rotary, as_bytes(cache), q_latent if cache_scale is None else cache_scale, block_tables, starts, context_lens,
        splits.parts, splits.tops, splits.sums, *q_latent.stride()[:2], *q_rotary.stride()[:2], *cache.stride()[:2], block_tables.stride(0),
        scale * LOG2_E.value, heads, seqs, tiles, splits.number,
        LATENT=latent, LATENT_DIM=max(16, triton.next_power_of_2(latent)),
        ROTARY=rotary, ROTARY_DIM=max(16, triton.next_power_of_2(rotary)), BLOCK_SIZE=cache.shape[1],
        ROWS=rows, TILE=_tile(q_latent.dtype), FP8=conversion(cache_scale), IS_PREFILL=is_prefill, DIRECT=splits.number == 1,
        num_warps=8, num_stages=3 if rows == 64 else 5,
    )  # fmt: skip


def _rows(wanted: int, q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor) -> int:
    """Return the number of rows of a tile."""
    if hopper_mla.takes(q_latent, q_rotary, cache):
        return hopper_mla.ROWS
    return min(16 if q_latent.dtype == torch.float32 else 64, max(16, triton.next_power_of_2(wanted)))


def _tile(dtype: torch.dtype) -> int:
    """Return the number of keys of a tile."""
    return 16 if dtype == torch.float32 else 32
