"""Head norms, rotation and cache write in one launch: one program per token and head, whatever the head is."""

import torch
import triton
import triton.language as tl

from kernels.triton.jit import jit


@jit
def _rotate_and_cache(
    qkv, norm, cos, sin, k_cache, v_cache, slots, q_out,
    qkv_token, qkv_head, cos_token, sin_token, cache_block, cache_offset, cache_head, q_token, q_head,
    heads, kv_heads, half, block_size, eps,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    source = qkv + token * qkv_token + head * qkv_head + pair
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    slot = tl.load(slots + token)
    place = slot // block_size * cache_block + slot % block_size * cache_offset
    if head >= heads + kv_heads:
        target = v_cache + place + (head - heads - kv_heads) * cache_head + pair
        tl.store(target, first.to(v_cache.dtype.element_ty), mask=inside)
        tl.store(target + half, second.to(v_cache.dtype.element_ty), mask=inside)
    else:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=0)
            scale = tl.rsqrt(squares / (2 * half) + eps)
            weights = norm + head * 2 * half + pair
            first_weight = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
            second_weight = tl.load(weights + half, mask=inside, other=0.0).to(tl.float32)
            # rounded between norm and rotation, as the plain form does
            wide_first = (wide_first * scale * first_weight).to(first.dtype).to(tl.float32)
            wide_second = (wide_second * scale * second_weight).to(first.dtype).to(tl.float32)
        c = tl.load(cos + token * cos_token + pair, mask=inside, other=0.0)
        s = tl.load(sin + token * sin_token + pair, mask=inside, other=0.0)
        turned_first = (wide_first * c - wide_second * s).to(first.dtype)
        turned_second = (wide_second * c + wide_first * s).to(first.dtype)
        if head < heads:
            target = q_out + token * q_token + head * q_head + pair
            tl.store(target, turned_first, mask=inside)
            tl.store(target + half, turned_second, mask=inside)
        else:
            target = k_cache + place + (head - heads) * cache_head + pair
            tl.store(target, turned_first.to(k_cache.dtype.element_ty), mask=inside)
            tl.store(target + half, turned_second.to(k_cache.dtype.element_ty), mask=inside)


def rotate_and_cache(
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As kernels/qkv.py."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    heads = all_heads - 2 * kv_heads
    assert k_cache.stride() == v_cache.stride(), "keys and values must be strided alike"
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _rotate_and_cache[(tokens, all_heads)](
            qkv, qkv if norm is None else norm, cos, sin, k_cache, v_cache, slot_mapping, out,
            qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0), *k_cache.stride()[:3], out.stride(0), out.stride(1),
            heads, kv_heads, head_dim // 2, k_cache.shape[1], eps,
            BLOCK=triton.next_power_of_2(max(1, head_dim // 2)), HAS_NORM=norm is not None, num_warps=1,
        )  # fmt: skip
    return out
