"""Checks of the paged cache: one layer's view of an arena, with blocks, tokens and heads strided.

This module knows the assumptions of operations about the cache, and names the argument that violates one.
"""

import torch
from torch import Tensor

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.checks import FLOATS, ArgumentCheck, check_indices, placed


def is_cache(k_cache: Tensor, v_cache: Tensor, kv_scales: Tensor | None = None) -> bool:
    """True if the caches have equal shapes, dtypes and strides, contiguous heads, and scales iff FP8.

    The shape is [num_blocks, block_size, kv_heads, head_dim].
    """
    return (
        k_cache.dim() == 4
        and (k_cache.dtype in FLOATS if kv_scales is None else k_cache.dtype == FP8 and _are_scales(kv_scales))
        and k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == 1
        and placed(k_cache, v_cache, kv_scales)
    )


def _are_scales(kv_scales: Tensor) -> bool:
    return kv_scales.shape == (2,) and kv_scales.dtype == torch.float32 and kv_scales.is_contiguous()


def fits_cache(x: Tensor, k_cache: Tensor, kv_scales: Tensor | None) -> bool:
    """True if x has a dtype that can be written to the cache or multiplied with it."""
    return x.dtype == k_cache.dtype if kv_scales is None else x.dtype in FLOATS


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


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> bool:
    """True if q [tokens, heads, head_dim] fits the caches: kv heads divide heads, which are contiguous."""
    return (
        is_cache(k_cache, v_cache, rule.kv_scales)
        and q.dim() == 3
        and fits_cache(q, k_cache, rule.kv_scales)
        and q.shape[2] == k_cache.shape[3]
        and q.shape[1] > 0
        and k_cache.shape[2] > 0
        and q.shape[1] % k_cache.shape[2] == 0
        and q.stride(2) == 1
        and rule.fits(q)
        and placed(q, k_cache, rule.sinks)
    )


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


def can_read(q: Tensor, block_tables: Tensor, context_lens: Tensor, max_context_len: int, block_size: int) -> bool:
    """True if tables and lengths match q, whose first dimension is that of sequences."""
    return (
        block_tables.dim() == 2
        and block_tables.shape[0] == q.shape[0]
        and block_tables.stride(1) == 1
        and context_lens.shape == q.shape[:1]
        and context_lens.is_contiguous()
        and block_tables.dtype == context_lens.dtype == torch.int64
        and 0 < max_context_len <= block_tables.shape[1] * block_size
        and placed(q, block_tables, context_lens)
    )


def require_tables(
    check: ArgumentCheck, block_tables: Tensor, context_lens: Tensor, max_context_len: int, block_size: int
) -> None:
    check.tensor("block_tables", block_tables, "seqs _", (torch.int64,), dense=1)
    check.tensor("context_lens", context_lens, "seqs", (torch.int64,), dense=1)
    room = block_tables.shape[1] * block_size
    fits = 0 < max_context_len <= room or not block_tables.shape[0]
    check.require("max_context_len", fits, f"is {max_context_len}, and the tables hold 1 to {room} tokens")


def can_read_batch(q: Tensor, batch: VarlenBatch, block_size: int, *, sees_ahead: bool = False) -> bool:
    """True if tables and lengths match the tokens of q.

    Sums the lengths on the host, which costs little compared with a step of a prompt. `sees_ahead`: queries may see keys after their own positions.
    """
    seqs = len(batch.host_q_lens)
    q_lens, context_lens, last_visible = batch[3:]
    return (
        batch.block_tables.dim() == 2
        and batch.block_tables.shape[0] == seqs
        and batch.context_lens.shape == (seqs,)
        and batch.block_tables.stride(1) == 1
        and batch.block_tables.dtype == torch.int64
        and batch.cu_seqlens_q.shape == (seqs + 1,)
        and batch.cu_seqlens_q.dtype == batch.context_lens.dtype == torch.int32
        and batch.cu_seqlens_q.is_contiguous()
        and batch.context_lens.is_contiguous()
        and len(context_lens) == seqs
        and sum(q_lens) == q.shape[0]
        and all(0 < tokens <= context for tokens, context in zip(q_lens, context_lens, strict=True))
        and max(context_lens, default=0) <= batch.block_tables.shape[1] * block_size
        and (last_visible is None or (sees_ahead and _is_per_token(last_visible, q)))
        and placed(q, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, last_visible)
    )


def _is_per_token(x: Tensor, q: Tensor) -> bool:
    return x.shape == q.shape[:1] and x.dtype == torch.int32 and x.is_contiguous()


def require_batch(
    check: ArgumentCheck, batch: VarlenBatch, tokens: int, block_size: int, *, sees_ahead: bool = False
) -> None:
    check.tensor("batch.block_tables", batch.block_tables, "seqs _", (torch.int64,), dense=1)
    check.derive("seqs+1", batch.block_tables.shape[0] + 1, "batch.block_tables")
    check.tensor("batch.cu_seqlens_q", batch.cu_seqlens_q, "seqs+1", (torch.int32,), dense=1)
    check.tensor("batch.context_lens", batch.context_lens, "seqs", (torch.int32,), dense=1)
    seqs, room = batch.block_tables.shape[0], batch.block_tables.shape[1] * block_size
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


def check_slots(operation: str, slot_mapping: Tensor, k_cache: Tensor) -> None:
    """Raise ArgumentError for a slot that is not in the cache. Waits for the device: only for debug mode."""
    check_indices(operation, "slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1], "the cache's slots")


def check_blocks(operation: str, block_tables: Tensor, context_lens: Tensor, k_cache: Tensor, of: str = "") -> None:
    """Raise ArgumentError for a block that is not in the cache or a context longer than its table.

    The padding of the tables is also checked. Waits for the device: only for debug mode.
    """
    check_indices(operation, f"{of}block_tables", block_tables, k_cache.shape[0], "the cache's blocks")
    longest = block_tables.shape[1] * k_cache.shape[1]
    check_indices(operation, f"{of}context_lens", context_lens, longest + 1, "the capacity of a table", begin=1)
