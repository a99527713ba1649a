"""Head norms, rotation and cache write in one launch; a program has a few heads of a token."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.elementwise.kv_write import place_of, store_cached
from pilotlight.kernels.triton.elementwise.rotary import turn
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import heads_per_program
from pilotlight.kernels.triton.matrices.fp8_codes import as_bytes, conversion


@jit(of_batch=("slots",))
def _rotate_and_cache(
    qkv, norm, cos, sin, k_cache, v_cache, slots, kv_scales, q_out,
    qkv_token, qkv_head, cos_token, sin_token, cache_block, cache_offset, cache_head,
    heads, kv_heads, half, rotated, eps, head_tiles,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, FP8: tl.constexpr,
    PARTIAL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head, pair = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    is_query = (head < heads)[:, None]
    is_key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    is_value = ((head >= heads + kv_heads) & (head < heads + 2 * kv_heads))[:, None]
    inside = (pair < half)[None, :]
    at_first, at_second = pair[None, :], pair[None, :] + half
    if PARTIAL:  # the other numbers are paired in any way
        at_first = tl.where(pair < rotated, pair, pair + rotated)[None, :]
        at_second = tl.where(pair < rotated, pair + rotated, pair + half)[None, :]
    place = head
    if GATES:
        place = tl.where(head < heads, 2 * head, head + heads)
    source = qkv + token * qkv_token + place[:, None] * qkv_head
    first = tl.load(source + at_first, mask=inside & (is_query | is_key | is_value), other=0.0)
    second = tl.load(source + at_second, mask=inside & (is_query | is_key | is_value), other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        weights = norm + head[:, None] * 2 * half
        first_weight = tl.load(weights + at_first, mask=inside & (is_query | is_key), other=0.0).to(tl.float32)
        second_weight = tl.load(weights + at_second, mask=inside & (is_query | is_key), other=0.0).to(tl.float32)
        # values are rounded between norm and rotation, as in the torch form
        wide_first = (wide_first * scale * first_weight).to(first.dtype).to(tl.float32)
        wide_second = (wide_second * scale * second_weight).to(first.dtype).to(tl.float32)
    c = tl.load(cos + token * cos_token + pair, mask=pair < rotated, other=1.0)[None, :]
    s = tl.load(sin + token * sin_token + pair, mask=pair < rotated, other=0.0)[None, :]
    turned_first, turned_second = turn(wide_first, wide_second, c, s)
    turned_first, turned_second = turned_first.to(first.dtype), turned_second.to(first.dtype)
    target = q_out + token * heads * 2 * half + head[:, None] * 2 * half
    tl.store(target + at_first, turned_first, mask=inside & is_query)
    tl.store(target + at_second, turned_second, mask=inside & is_query)
    slot = place_of(slots, token, cache_block, cache_offset, BLOCK_SIZE)
    target = k_cache + slot + (head - heads)[:, None] * cache_head
    store_cached(target + at_first, turned_first, kv_scales, inside & is_key, FP8)
    store_cached(target + at_second, turned_second, kv_scales, inside & is_key, FP8)
    target = v_cache + slot + (head - heads - kv_heads)[:, None] * cache_head
    store_cached(target + at_first, first, kv_scales + 1, inside & is_value, FP8)
    store_cached(target + at_second, second, kv_scales + 1, inside & is_value, FP8)


def rotate_and_cache(
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    has_gates: bool = False,
) -> torch.Tensor:
    """Compute rotate_and_cache of kernels/elementwise/qkv.py."""
    tokens, head_dim, kv_heads = qkv.shape[0], qkv.shape[2], k_cache.shape[2]
    heads = (qkv.shape[1] - 2 * kv_heads) // (1 + has_gates)
    assert k_cache.stride() == v_cache.stride(), "caches of keys and values must have equal strides"
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if qkv.numel():
        block = triton.next_power_of_2(head_dim // 2)
        tile = heads_per_program(heads + 2 * kv_heads, block)
        head_tiles = triton.cdiv(heads + 2 * kv_heads, tile)
        _rotate_and_cache[(tokens * head_tiles,)](
            qkv, qkv if norm is None else norm, cos, sin, as_bytes(k_cache), as_bytes(v_cache), slot_mapping,
            qkv if kv_scales is None else kv_scales, out,
            qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0), *k_cache.stride()[:3],
            heads, kv_heads, head_dim // 2, cos.shape[1], eps, head_tiles,
            BLOCK_SIZE=k_cache.shape[1], HEADS=tile, BLOCK=block, HAS_NORM=norm is not None,
            FP8=conversion(kv_scales), PARTIAL=2 * cos.shape[1] < head_dim, GATES=has_gates, num_warps=2,
        )  # fmt: skip
    return out
