"""Checks of the paged cache: one layer's view of an arena, with blocks, tokens and heads strided.

This module knows the assumptions of operations about the cache, and names the argument that violates one.
"""

import torch
from torch import Tensor

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.checks import FLOATS, ArgumentCheck


def require_cache(
    check: ArgumentCheck, k_cache: Tensor, v_cache: Tensor, kv_scales: Tensor | None, scales_name: str = "kv_scales"
) -> None:
    if kv_scales is None and k_cache.dtype == FP8:
        check.require(scales_name, False, "is missing: a cache in FP8 has one scale for keys and one for values")
    kinds = FLOATS if kv_scales is None else (FP8,)
    check.tensor("k_cache", k_cache, "blocks block_size kv_heads head_dim", kinds, dense=1)
    check.tensor("v_cache", v_cache, "blocks block_size kv_heads head_dim", (k_cache.dtype,), dense=1)
    alike = k_cache.stride() == v_cache.stride()
    check.require(
        "v_cache", alike, f"has strides {v_cache.stride()}, and k_cache {k_cache.stride()}; they must be equal"
    )
    if kv_scales is not None:
        check.tensor(scales_name, kv_scales, "2", (torch.float32,), dense=1)


def kinds_for(k_cache: Tensor, kv_scales: Tensor | None) -> tuple[torch.dtype, ...]:
    """Return the dtypes allowed for tensors that are written to the cache or multiplied with it."""
    return (k_cache.dtype,) if kv_scales is None else FLOATS


def require_queries(check: ArgumentCheck, q: Tensor, rows: str, k_cache: Tensor, rule: AttentionRule) -> None:
    """Raise ArgumentError for invalid queries; the cache must have been checked before."""
    check.tensor("q", q, f"{rows} heads head_dim", kinds_for(k_cache, rule.kv_scales), dense=1)
    heads, kv_heads = check.size("heads"), check.size("kv_heads")
    check.require(
        "q",
        kv_heads > 0 and heads % kv_heads == 0,
        f"has {heads} heads, which {kv_heads} key heads cannot share evenly",
    )
    rule.require(check, q)


def require_tables(
    check: ArgumentCheck, block_tables: Tensor, context_lens: Tensor, max_context_len: int, cache: Tensor
) -> None:
    """Refuse tables and lengths that do not match the sequences or the cache [blocks, block_size, ...]."""
    check.tensor("block_tables", block_tables, "seqs _", (torch.int64,), dense=1)
    check.tensor("context_lens", context_lens, "seqs", (torch.int64,), dense=1)
    room = block_tables.shape[1] * cache.shape[1]
    fits = 0 < max_context_len <= room or not block_tables.shape[0]
    check.require("max_context_len", fits, f"is {max_context_len}, and the tables hold 1 to {room} tokens")
    check_blocks(check, block_tables, context_lens, cache)


def require_tables_of_tokens(check: ArgumentCheck, block_tables: Tensor, tokens: int) -> None:
    check.tensor("block_tables", block_tables, "_ _", (torch.int64,), dense=1)
    rows = block_tables.shape[0]
    check.require("block_tables", rows in (1, tokens), f"has {rows} rows, wanted 1 or one for each of {tokens} tokens")


def require_batch(
    check: ArgumentCheck, batch: VarlenBatch, tokens: int, cache: Tensor, *, sees_ahead: bool = False
) -> None:
    """Refuse tables and lengths that do not match the queries or the cache [blocks, block_size, ...].

    `sees_ahead`: queries may see keys after their own positions.
    """
    check.tensor("batch.block_tables", batch.block_tables, "seqs _", (torch.int64,), dense=1)
    check.derive("seqs+1", batch.block_tables.shape[0] + 1, "batch.block_tables")
    check.tensor("batch.cu_seqlens_q", batch.cu_seqlens_q, "seqs+1", (torch.int32,), dense=1)
    check.tensor("batch.context_lens", batch.context_lens, "seqs", (torch.int32,), dense=1)
    seqs, room = batch.block_tables.shape[0], batch.block_tables.shape[1] * cache.shape[1]
    for name, lens in (("batch.host_q_lens", batch.host_q_lens), ("batch.host_context_lens", batch.host_context_lens)):
        check.require(name, len(lens) == seqs, f"has {len(lens)} lengths, and batch.block_tables {seqs} rows")
    total = sum(batch.host_q_lens)
    check.require("batch.host_q_lens", total == tokens, f"sums to {total}, and q has {tokens} tokens")
    for queries, context in zip(batch.host_q_lens, batch.host_context_lens, strict=True):
        check.require("batch.host_q_lens", queries > 0 or not total, f"holds {queries}: every sequence has a query")
        fits = queries <= context <= room
        check.require(
            "batch.host_context_lens", fits, f"holds {context}, wanted {queries} (its queries) to {room} (its table)"
        )
    if batch.last_visible is not None:
        check.require("batch.last_visible", sees_ahead, "is set, but here a query sees no key after its own position")
        check.tensor("batch.last_visible", batch.last_visible, "tokens", (torch.int32,), dense=1)
    check_blocks(check, batch.block_tables, batch.context_lens, cache, "batch.")


def check_slots(check: ArgumentCheck, slot_mapping: Tensor, k_cache: Tensor) -> None:
    """Refuse a slot that is not in the cache, in debug mode."""
    check.indices("slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1], "the cache's slots")


def check_blocks(
    check: ArgumentCheck, block_tables: Tensor, context_lens: Tensor, k_cache: Tensor, of: str = ""
) -> None:
    """Refuse a block that is not in the cache or a context longer than its table, in debug mode.

    The padding of the tables is also checked.
    """
    check.indices(f"{of}block_tables", block_tables, k_cache.shape[0], "the cache's blocks")
    longest = block_tables.shape[1] * k_cache.shape[1]
    check.indices(f"{of}context_lens", context_lens, longest + 1, "the capacity of a table", begin=1)
