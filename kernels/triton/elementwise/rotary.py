"""Rotary position embedding, half-split or interleaved; a program rotates a few heads of a token."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import heads_per_program


@jit
def _rotary(
    x, cos, sin, out, x_token, x_head, cos_token, sin_token, heads, half, head_tiles,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head, pair = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    source = x + token * x_token + head[:, None] * x_head
    first, second = load_pairs(source, pair[None, :], half, inside, INTERLEAVED)
    c = tl.load(cos + token * cos_token + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * sin_token + pair, mask=pair < half, other=0.0)[None, :]
    turned_first, turned_second = turn(first.to(tl.float32), second.to(tl.float32), c, s)
    target = out + token * heads * 2 * half + head[:, None] * 2 * half + pair[None, :]
    tl.store(target, turned_first.to(first.dtype), mask=inside)
    tl.store(target + half, turned_second.to(first.dtype), mask=inside)


@jit
def load_pairs(source, pair, half, inside, INTERLEAVED: tl.constexpr):
    """Load both values of each pair."""
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    return tl.load(source + first, mask=inside, other=0.0), tl.load(source + second, mask=inside, other=0.0)


@jit
def turn(first, second, c, s):
    return first * c - second * s, second * c + first * s


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """Compute rotary of kernels/elementwise."""
    tokens, heads, head_dim = x.shape
    if not x.stride(2) == cos.stride(1) == sin.stride(1) == 1:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(head_dim // 2)
        tile = heads_per_program(heads, block)
        head_tiles = triton.cdiv(heads, tile)
        _rotary[(tokens * head_tiles,)](
            x, cos, sin, out, *x.stride()[:2], cos.stride(0), sin.stride(0), heads, head_dim // 2, head_tiles,
            HEADS=tile, BLOCK=block, INTERLEAVED=is_interleaved, num_warps=2,
        )  # fmt: skip
    return out
