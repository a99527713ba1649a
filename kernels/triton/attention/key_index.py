"""The write of an index's keys, and their scores: a program computes those of some keys for one token.

All heads are the rows of one small matrix product with a tile of keys, whose weighted sum is the tile's scores, so that no score of a head reaches
memory. Programs of adjacent tokens of one prompt run at the same time and read the same keys from the cache.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.attention.fp8_cache import LEAST_SIZE
from pilotlight.kernels.triton.attention.paged_tiles import load_rows
from pilotlight.kernels.triton.elementwise.kv_write import place_of
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion, decode_fp8, encode_fp8

_KEYS = 512  # keys of a program
_LEAST = tl.constexpr(LEAST_SIZE)


@jit(of_batch=("slots",))
def _write(
    keys, cache, scales, slots, keys_token, cache_block, cache_offset, scales_block, scales_offset,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    inside = column < HEAD_DIM
    key = tl.load(keys + token * keys_token + column, mask=inside, other=0.0)
    if FP8:
        wide = key.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), axis=0), _LEAST) / 448.0
        tl.store(scales + place_of(slots, token, scales_block, scales_offset, BLOCK_SIZE), scale)
        key = encode_fp8(wide / scale, FP8)
    tl.store(cache + place_of(slots, token, cache_block, cache_offset, BLOCK_SIZE) + column, key, mask=inside)


@jit(of_batch=("tables", "visible", "tables_token", "longest", "tokens"))
def _score(
    q, weights, cache, scales, tables, visible, out,
    q_token, q_head, weights_token, cache_block, cache_offset, scales_block, scales_offset, tables_token, longest, tokens,
    HEADS: tl.constexpr, HEADS_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token, first = (program % tokens).to(tl.int64), program // tokens * KEYS
    head, column = tl.arange(0, HEADS_DIM), tl.arange(0, DIM)
    is_head = head < HEADS
    queries = tl.load(
        q + token * q_token + head[:, None] * q_head + column[None, :],
        mask=is_head[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    shares = tl.load(weights + token * weights_token + head, mask=is_head, other=0.0)
    seen = tl.load(visible + token).to(tl.int32)
    for start in range(first, tl.minimum(first + KEYS, longest), TILE):
        at = start + tl.arange(0, TILE)
        is_key = at < seen
        block = tl.load(tables + token * tables_token + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = block * cache_block + at % BLOCK_SIZE * cache_offset
        keys = load_rows(cache, place[:, None] + column[None, :], is_key, column, HEAD_DIM, DIM, True)
        if FP8:
            keys = decode_fp8(keys, FP8).to(queries.dtype)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * shares[:, None], axis=0)
        if FP8:
            scores *= tl.load(scales + block * scales_block + at % BLOCK_SIZE * scales_offset, mask=is_key, other=0.0)
        tl.store(out + token * longest + at, tl.where(is_key, scores, 0.0), mask=at < longest)


def index_write(
    keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    """Compute index_write of kernels/attention/key_index.py."""
    tokens, dim = keys.shape
    if tokens:
        _write[(tokens,)](
            keys, as_bytes(cache), keys if scales is None else scales, slot_mapping, keys.stride(0), *cache.stride()[:2],
            *((0, 0) if scales is None else scales.stride()),
            HEAD_DIM=dim, DIM=triton.next_power_of_2(dim), BLOCK_SIZE=cache.shape[1], FP8=conversion(scales), num_warps=1,
        )  # fmt: skip


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    visible: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Compute index_scores of kernels/attention/key_index.py; keys that no token sees are not read."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, longest), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    _score[(tokens * triton.cdiv(longest, _KEYS),)](
        q, weights, as_bytes(cache), weights if scales is None else scales, block_tables, visible, out,
        *q.stride()[:2], weights.stride(0), *cache.stride()[:2], *((0, 0) if scales is None else scales.stride()),
        block_tables.stride(0) if block_tables.shape[0] == tokens else 0, longest, tokens,
        HEADS=heads, HEADS_DIM=max(16, triton.next_power_of_2(heads)), HEAD_DIM=dim, DIM=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=cache.shape[1], KEYS=_KEYS, TILE=16 if q.dtype == torch.float32 else 64, FP8=conversion(scales), num_warps=4,
    )  # fmt: skip
    return out
