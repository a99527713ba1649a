"""Paged attention of the last few tokens of each sequence, as many of each: what checks a draft of k tokens and adds one, in one pass over the cache.

A sequence with a shorter draft is padded behind it: what a query does not see does not change it.
"""

import torch

from kernels.cpu import ops
from kernels.decode_attention import Rule, attend_by_torch
from kernels.device import triton_form
from kernels.varlen import VarlenBatch

_triton = triton_form("verify_attention")


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [seqs, queries, heads, head_dim], the last tokens of each context, already written; all else as decode_attention
    has it, whose result for each query this is -> [seqs, queries, heads, head_dim]."""
    if q.is_cuda and _triton is not None:
        return _triton.verify_attention(
            q, k_cache, v_cache, block_tables, context_lens, max_context_len, scale, window, sinks, soft_cap, kv_scales
        )
    native = _as_prompts(q, k_cache, v_cache, block_tables, context_lens, scale, window, sinks, soft_cap)
    if native is not None:
        return native
    rule = Rule(scale, window, sinks, soft_cap, kv_scales)
    return attend_by_torch(q, k_cache, v_cache, block_tables, context_lens, max_context_len, rule)


def _as_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor | None:
    """To the C library, queries over a cached prefix are the end of a prompt. It does not look at the host's lengths."""
    seqs, queries = q.shape[:2]
    if not q.is_contiguous():
        return None
    starts = torch.arange(0, (seqs + 1) * queries, queries, dtype=torch.int32, device=q.device)
    batch = VarlenBatch(block_tables, starts, context_lens.int(), (), ())
    out = ops.prefill_attention(q.flatten(0, 1), k_cache, v_cache, batch, scale, window, sinks, soft_cap)
    return None if out is None else out.view(q.shape)
