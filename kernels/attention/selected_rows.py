"""Copies of some vectors of a paged cache, side by side."""

import torch

from pilotlight.kernels.attention.fp8_cache import FP8

_BLOCKS = (64, 16)  # copied vectors are in blocks of the first of these sizes that divides their number


def copied(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    num_read: torch.Tensor,
    dtype: torch.dtype,
    cache_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Copy the vectors at `positions` for `mla_decode`.

    Return a cache of them, its block tables, its context lengths and the longest one.
    """
    (tokens, top_k), block_size = positions.shape, cache.shape[1]
    blocks = block_tables.expand(tokens, -1).gather(1, positions // block_size)
    selected = rows_of(cache, (blocks, positions % block_size), cache_scale, dtype)
    size = next((size for size in _BLOCKS if top_k % size == 0), top_k)
    tables = torch.arange(tokens * (top_k // size), device=cache.device).view(tokens, -1)
    return selected.view(-1, size, cache.shape[2]), tables, num_read, top_k


def rows_of(
    cache: torch.Tensor, index: tuple[torch.Tensor, ...], cache_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return cache[index], widened to `dtype` if the cache is in FP8. `cache_scale`: [1], its scale."""
    if cache_scale is None:
        return cache[index]
    # torch can index bytes but not FP8 tensors
    return (cache.view(torch.uint8)[index].view(FP8).float() * cache_scale).to(dtype)
