"""Writes new keys and values into the paged cache.

A slot is a token's place in the cache: block * block_size + offset. The caches are views of one layer in a block-major
arena, so they are strided between blocks and contiguous inside one; the kernel refuses to assume more than that.
"""

import torch

from kernels import checks
from kernels.checks import INDICES, Call, placed
from kernels.paged import check_slots, is_cache, look_at_cache


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; slot_mapping [tokens]
    int64."""
    if not (
        is_cache(k_cache, v_cache)
        and k.shape == v.shape == (slot_mapping.numel(), *k_cache.shape[2:])
        and k.dtype == v.dtype == k_cache.dtype
        and slot_mapping.dtype in INDICES
        and slot_mapping.dim() == 1
        and placed(k_cache, v_cache, k, v, slot_mapping)
    ):
        _look_at(k, v, k_cache, v_cache, slot_mapping)
    if checks.DEBUG:
        check_slots("kv_write", slot_mapping, k_cache)
    store(k, v, k_cache, v_cache, slot_mapping)


def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """For callers who have looked at the arguments themselves."""
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v


def _look_at(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    call = Call("kv_write")
    look_at_cache(call, k_cache, v_cache)
    call.tensor("k", k, "tokens kv_heads head_dim", (k_cache.dtype,))
    call.tensor("v", v, "tokens kv_heads head_dim", (k_cache.dtype,))
    call.tensor("slot_mapping", slot_mapping, "tokens", INDICES)
