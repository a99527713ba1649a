"""Writes new keys and values into the paged cache.

A slot is a token's place in the cache: block * block_size + offset. The caches are views of one layer in a block-major
arena, so they are strided between blocks and contiguous inside one; the kernel refuses to assume more than that.
"""

import torch

from kernels.device import triton_form
from kernels.fp8_cache import quantize

_triton = triton_form("kv_write")


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; slot_mapping [tokens]
    int64; kv_scales [2] fp32: of a cache in FP8, what a stored key and a stored value are multiplied by."""
    if k.is_cuda and _triton is not None:
        _triton.kv_write(k, v, k_cache, v_cache, slot_mapping, kv_scales)
        return
    if kv_scales is not None:  # torch indexes bytes, and no FP8
        k, v = quantize(k, kv_scales[0]).view(torch.uint8), quantize(v, kv_scales[1]).view(torch.uint8)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v
