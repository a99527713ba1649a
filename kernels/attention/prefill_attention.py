"""Causal paged attention of prompt chunks over their cached prefix, or over a window of it.

Chunks form a varlen batch; query heads are grouped. The chunks' own keys and values are already written. Queries of an image may also see the keys of
the rest of the image (VarlenBatch.last_visible). The torch form is in prefill_by_torch.py.
"""

from typing import Any

import torch

from pilotlight.kernels import checks
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.paged import (
    can_attend,
    can_read_batch,
    check_blocks,
    require_batch,
    require_cache,
    require_queries,
)
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation


def check(
    operation: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    *,
    sees_ahead: bool = True,
) -> None:
    if checks.DEBUG or not (
        can_attend(q, k_cache, v_cache, rule) and can_read_batch(q, batch, k_cache.shape[1], sees_ahead=sees_ahead)
    ):
        found = ArgumentCheck(operation)
        require_cache(found, k_cache, v_cache, rule.kv_scales, "rule.kv_scales")
        require_queries(found, q, "tokens", k_cache, rule)
        require_batch(found, batch, q.shape[0], k_cache.shape[1], sees_ahead=sees_ahead)
        if checks.DEBUG:
            check_blocks(operation, batch.block_tables, batch.context_lens, k_cache, "batch.")


def _native(library: Library, *args: Any) -> torch.Tensor | None:
    """Check the arguments, because C does not, and compute with C. Checks are cheap beside a prompt."""
    check("prefill_attention", *args)
    return ops.prefill_attention(library, *args)


@operation(check, triton="attention.prefill_attention", native=_native)
def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attend causally from the tokens of prompt chunks; return [tokens, heads, head_dim].

    q [tokens, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim].
    """
    return attend_by_torch(q, k_cache, v_cache, batch, rule)
