"""Writes of new keys and values to the paged cache.

A slot is a token's place in the cache: block * block_size + offset. The caches are views of one layer of an arena with equal strides; only the values
of a head are contiguous.
"""

import torch

from pilotlight.kernels.attention.fp8_cache import quantize
from pilotlight.kernels.attention.paged import check_slots, kinds_for, require_cache
from pilotlight.kernels.checks import INDICES, ArgumentCheck
from pilotlight.kernels.dispatch import operation


def _check(
    check: ArgumentCheck,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    require_cache(check, k_cache, v_cache, kv_scales)
    check.tensor("k", k, "tokens kv_heads head_dim", kinds_for(k_cache, kv_scales))
    check.tensor("v", v, "tokens kv_heads head_dim", (k.dtype,))
    check.tensor("slot_mapping", slot_mapping, "tokens", INDICES)
    check_slots(check, slot_mapping, k_cache)


@operation(_check, triton="elementwise.kv_write")
def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values to their slots.

    k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; slot_mapping [tokens] int64; kv_scales [2] fp32, for FP8
    caches: the factors by which a stored key and a stored value are multiplied.
    """
    store(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Compute `kv_write` with torch, for checked arguments."""
    if kv_scales is not None:  # torch can index bytes but not FP8 tensors
        k, v = quantize(k, kv_scales[0]).view(torch.uint8), quantize(v, kv_scales[1]).view(torch.uint8)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v
