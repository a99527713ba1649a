"""Paged attention of the last few tokens of each sequence, as many of each: what checks a draft of k tokens and adds one, in one pass over the cache.

A sequence with a shorter draft is padded behind it: what a query does not see does not change it. The engine does not use it yet.
"""

import torch

from kernels import checks
from kernels.attention_rule import AttentionRule
from kernels.checks import ArgumentCheck
from kernels.cpu import ops
from kernels.cpu.library import Library
from kernels.decode_attention import attend_by_torch
from kernels.dispatch import operation
from kernels.paged import can_attend, can_read, check_blocks, require_cache, require_queries, require_tables
from kernels.varlen import VarlenBatch


def _check(
    operation: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> None:
    if checks.DEBUG or not (
        q.dim() == 4
        and q.shape[1] > 0
        and can_attend(q[:, 0], k_cache, v_cache, rule)
        and can_read(q, block_tables, context_lens, max_context_len, k_cache.shape[1])
        and max_context_len >= q.shape[1]
    ):
        check = ArgumentCheck(operation)
        require_cache(check, k_cache, v_cache, rule.kv_scales, "rule.kv_scales")
        require_queries(check, q, "seqs queries", k_cache, rule)
        queries = check.size("queries")
        check.require("q", queries > 0, "has no query for each sequence")
        require_tables(check, block_tables, context_lens, max_context_len, k_cache.shape[1])
        fits = queries <= max_context_len or not q.shape[0]
        check.require("max_context_len", fits, f"is {max_context_len}, and each sequence has {queries} queries alone")
        if checks.DEBUG:
            check_blocks(operation, block_tables, context_lens, k_cache)


def _as_prompts(
    library: Library,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor | None:
    """To the C library, queries over a cached prefix are the end of a prompt. It does not look at the host's lengths."""
    _check("verify_attention", q, k_cache, v_cache, block_tables, context_lens, max_context_len, rule)
    seqs, queries = q.shape[:2]
    if not q.is_contiguous():
        return None
    starts = torch.arange(0, (seqs + 1) * queries, queries, dtype=torch.int32, device=q.device)
    batch = VarlenBatch(block_tables, starts, context_lens.int(), (), ())
    out = ops.prefill_attention(library, q.flatten(0, 1), k_cache, v_cache, batch, rule)
    return None if out is None else out.view(q.shape)


@operation(_check, triton="verify_attention", native=_as_prompts)
def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """q [seqs, queries, heads, head_dim], the last tokens of each context, already written; all else as decode_attention
    has it, whose result for each query this is -> [seqs, queries, heads, head_dim]."""
    if not q.shape[0]:
        return torch.empty_like(q)
    return attend_by_torch(q, k_cache, v_cache, block_tables, context_lens, max_context_len, rule)
