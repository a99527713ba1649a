"""Writes new keys and values into the paged cache.

A slot is a token's place in the cache: block * block_size + offset. The caches are views of one layer in a block-major
arena, so they are strided between blocks and contiguous inside one; the kernel refuses to assume more than that.
"""

import torch


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; slot_mapping [tokens]
    int64."""
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v
