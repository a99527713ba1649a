"""Causal paged attention of prompt chunks over their cached prefix, or over a window of it.

Chunks form a varlen batch; query heads are grouped. The chunks' own keys and values are already written. Queries of an image may also see the keys of
the rest of the image (VarlenBatch.last_visible). The torch form is in prefill_by_torch.py.
"""

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.paged import require_batch, require_cache, require_queries
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


def check(
    found: ArgumentCheck,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    *,
    sees_ahead: bool = True,
) -> None:
    require_cache(found, k_cache, v_cache, rule.kv_scales, "rule.kv_scales")
    require_queries(found, q, "tokens", k_cache, rule)
    require_batch(found, batch, q.shape[0], k_cache, sees_ahead=sees_ahead)


@operation(check, triton="attention.prefill_attention", native=ops.prefill_attention)
def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attend causally from the tokens of prompt chunks; return [tokens, heads, head_dim].

    q [tokens, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim].
    """
    return attend_by_torch(q, k_cache, v_cache, batch, rule)
