"""The paged cache as operations receive it: one layer's view of a block-major arena, strided between blocks.

Knows what an operation may assume of it and says which argument breaks that; refuses to know what is computed.
"""

import torch
from torch import Tensor

from kernels.checks import FLOATS, Call, check_indices, placed


def is_cache(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Both [num_blocks, block_size, kv_heads, head_dim], alike in all, a head's values side by side."""
    return (
        k_cache.dim() == 4
        and k_cache.dtype in FLOATS
        and k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == 1
        and placed(k_cache, v_cache)
    )


def look_at_cache(call: Call, k_cache: Tensor, v_cache: Tensor) -> None:
    call.tensor("k_cache", k_cache, "blocks block_size kv_heads head_dim", dense=1)
    call.tensor("v_cache", v_cache, "blocks block_size kv_heads head_dim", (k_cache.dtype,), dense=1)
    alike = k_cache.stride() == v_cache.stride()
    call.require(
        "v_cache", alike, f"has strides {v_cache.stride()}, and k_cache {k_cache.stride()}; they must be alike"
    )


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, sinks: Tensor | None) -> bool:
    """q [tokens, heads, head_dim], a head's values side by side, each of the cache's heads for as many of its heads."""
    return (
        is_cache(k_cache, v_cache)
        and q.dim() == 3
        and q.dtype == k_cache.dtype
        and q.shape[2] == k_cache.shape[3]
        and q.shape[1] > 0
        and k_cache.shape[2] > 0
        and q.shape[1] % k_cache.shape[2] == 0
        and q.stride(2) == 1
        and (window is None or window > 0)
        and (sinks is None or (sinks.shape == q.shape[1:2] and sinks.dtype in (q.dtype, torch.float32)))
        and (sinks is None or sinks.is_contiguous())
        and placed(q, k_cache, sinks)
    )


def look_at_queries(
    call: Call, q: Tensor, rows: str, k_cache: Tensor, window: int | None, sinks: Tensor | None
) -> None:
    """Of attention, whose caches were looked at before."""
    call.tensor("q", q, f"{rows} heads head_dim", (k_cache.dtype,), dense=1)
    heads, kv_heads = call.size("heads"), call.size("kv_heads")
    call.require(
        "q",
        kv_heads > 0 and heads % kv_heads == 0,
        f"has {heads} heads, which {kv_heads} key heads cannot share evenly",
    )
    if sinks is not None:
        call.tensor("sinks", sinks, "heads", (q.dtype, torch.float32), dense=1)
    call.require("window", window is None or window > 0, f"is {window}: a token sees at least itself")


def check_slots(operation: str, slot_mapping: Tensor, k_cache: Tensor) -> None:
    """For debug mode: waits for the device."""
    check_indices(operation, "slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1], "the cache's slots")


def check_blocks(operation: str, block_tables: Tensor, context_lens: Tensor, k_cache: Tensor, of: str = "") -> None:
    """For debug mode: waits for the device. Padding counts, since it is gathered; a context fits into its table."""
    check_indices(operation, f"{of}block_tables", block_tables, k_cache.shape[0], "the cache's blocks")
    longest = block_tables.shape[1] * k_cache.shape[1]
    check_indices(operation, f"{of}context_lens", context_lens, longest + 1, "what a table has room for", begin=1)
