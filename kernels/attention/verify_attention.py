"""Paged attention of each sequence's last few tokens, to verify drafts in one pass over the cache.

It is decode attention with more rows: on a CPU the result has the same bits as decoding one token after the other.
"""

from functools import partial

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.prefill_attention import check
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


@operation(partial(check, sees_ahead=False), triton="attention.verify_attention", native=ops.verify_attention)
def verify_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attend from the last few tokens of each sequence; return [tokens, heads, head_dim].

    q [tokens, heads, head_dim]. Keys and values of the tokens are already written. Other arguments are as in prefill_attention.
    """
    return attend_by_torch(q, k_cache, v_cache, batch, rule)
