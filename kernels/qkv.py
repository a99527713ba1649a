"""From the fused projection to what attention reads: heads normalised, queries and keys turned, keys and values in the cache."""

import torch

from kernels.cpu import ops
from kernels.device import triton_form
from kernels.kv_write import kv_write
from kernels.norm import head_rms_norm
from kernels.rotary import rotary

_triton = triton_form("qkv")


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
) -> torch.Tensor:
    """qkv [tokens, heads + 2 * kv_heads, head_dim], which may be overwritten; norm [heads + kv_heads, head_dim] or None;
    cos, sin [tokens, head_dim / 2] fp32; caches, slots and scales as kv_write's -> queries [tokens, heads, head_dim],
    strided between tokens."""
    if qkv.is_cuda and _triton is not None:
        return _triton.rotate_and_cache(qkv, norm, eps, cos, sin, k_cache, v_cache, slot_mapping, kv_scales)
    queries = ops.rotate_and_cache(qkv, norm, eps, cos, sin, k_cache, v_cache, slot_mapping)
    if queries is not None:
        return queries
    kv_heads = k_cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]  # queries and keys turn alike: one call for both
    if norm is not None:
        qk = head_rms_norm(qk, norm, eps)
    qk = rotary(qk, cos, sin)
    kv_write(qk[:, heads:], qkv[:, heads + kv_heads :], k_cache, v_cache, slot_mapping, kv_scales)
    return qk[:, :heads]
