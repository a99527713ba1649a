"""Writes of keys and values to the paged cache, plain or FP8; a program has some kv heads of a token."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import heads_per_program
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion, encode_fp8


@jit(of_batch=("slots",))
def _kv_write(
    k, v, k_cache, v_cache, slots, kv_scales,
    k_token, k_head, v_token, v_head, cache_block, cache_offset, cache_head, kv_heads, head_dim, head_tiles,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head = (tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < kv_heads) & (column < head_dim)
    place = place_of(slots, token, cache_block, cache_offset, BLOCK_SIZE) + head * cache_head + column
    keys = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0)
    values = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0)
    store_cached(k_cache + place, keys, kv_scales, inside, FP8)
    store_cached(v_cache + place, values, kv_scales + 1, inside, FP8)


@jit
def place_of(slots, token, cache_block, cache_offset, BLOCK_SIZE: tl.constexpr):
    slot = tl.load(slots + token)
    return slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_offset


@jit
def store_cached(target, x, scale, mask, FP8: tl.constexpr):
    """Store x, divided by the scale at pointer `scale` if the cache is FP8."""
    if FP8:
        tl.store(target, encode_fp8(x.to(tl.float32) / tl.load(scale), FP8), mask=mask)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=mask)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Compute kv_write of kernels/elementwise."""
    tokens, kv_heads, head_dim = k.shape
    assert k_cache.stride() == v_cache.stride(), "caches of keys and values must have equal strides"
    assert k_cache.stride(3) == 1, "heads must be contiguous"
    slot_mapping = slot_mapping.contiguous()
    if not k.stride(2) == v.stride(2) == 1:
        k, v = k.contiguous(), v.contiguous()
    if k.numel():
        block = triton.next_power_of_2(head_dim)
        tile = heads_per_program(kv_heads, block // 2)
        head_tiles = triton.cdiv(kv_heads, tile)
        _kv_write[(tokens * head_tiles,)](
            k, v, as_bytes(k_cache), as_bytes(v_cache), slot_mapping, k if kv_scales is None else kv_scales,
            *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], kv_heads, head_dim, head_tiles,
            BLOCK_SIZE=k_cache.shape[1], HEADS=tile, BLOCK=block, FP8=conversion(kv_scales), num_warps=2,
        )  # fmt: skip
