"""Paged attention of the last few tokens of each sequence, as many of each: what checks a draft of k tokens and adds one, in one pass over the cache.

A sequence with a shorter draft is padded behind it: what a query does not see does not change it.
"""

import torch

from kernels import checks
from kernels.attention_rule import AttentionRule
from kernels.checks import Call
from kernels.cpu import ops
from kernels.decode_attention import attend_by_torch
from kernels.device import triton_form
from kernels.paged import can_attend, can_read, check_blocks, look_at_cache, look_at_queries, look_at_tables
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
    rule = AttentionRule(scale, window, sinks, soft_cap, kv_scales)
    if checks.DEBUG or not (
        q.dim() == 4
        and q.shape[1] > 0
        and can_attend(q[:, 0], k_cache, v_cache, rule)
        and can_read(q, block_tables, context_lens, max_context_len, k_cache.shape[1])
        and max_context_len >= q.shape[1]
    ):
        _look_at(q, k_cache, v_cache, block_tables, context_lens, max_context_len, rule)
    if not q.shape[0]:
        return torch.empty_like(q)
    if q.is_cuda and _triton is not None:
        return _triton.verify_attention(q, k_cache, v_cache, block_tables, context_lens, max_context_len, *rule)
    native = _as_prompts(q, k_cache, v_cache, block_tables, context_lens, rule)
    if native is not None:
        return native
    return attend_by_torch(q, k_cache, v_cache, block_tables, context_lens, max_context_len, rule)


def _look_at(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> None:
    call = Call("verify_attention")
    look_at_cache(call, k_cache, v_cache, rule.kv_scales)
    look_at_queries(call, q, "seqs queries", k_cache, rule)
    queries = call.size("queries")
    call.require("q", queries > 0, "has no query for each sequence")
    look_at_tables(call, block_tables, context_lens, max_context_len, k_cache.shape[1])
    fits = queries <= max_context_len or not q.shape[0]
    call.require("max_context_len", fits, f"is {max_context_len}, and each sequence has {queries} queries alone")
    if checks.DEBUG:
        check_blocks("verify_attention", block_tables, context_lens, k_cache)


def _as_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor | None:
    """To the C library, queries over a cached prefix are the end of a prompt. It does not look at the host's lengths."""
    seqs, queries = q.shape[:2]
    if not q.is_contiguous():
        return None
    starts = torch.arange(0, (seqs + 1) * queries, queries, dtype=torch.int32, device=q.device)
    batch = VarlenBatch(block_tables, starts, context_lens.int(), (), ())
    out = ops.prefill_attention(q.flatten(0, 1), k_cache, v_cache, batch, *rule[:4])
    return None if out is None else out.view(q.shape)
