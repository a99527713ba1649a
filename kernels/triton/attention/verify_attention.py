"""Verify attention: decode attention with more rows, or prefill attention if numbers of tokens differ."""

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.triton.attention.decode_attention import attend
from pilotlight.kernels.triton.attention.prefill_attention import prefill_attention


def verify_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Compute verify_attention of kernels/attention."""
    q_lens = batch.host_q_lens
    if len(set(q_lens)) != 1:
        return prefill_attention(q, k_cache, v_cache, batch, rule)
    rows, longest = torch.unflatten(q, 0, (len(q_lens), q_lens[0])), max(batch.host_context_lens)
    return attend(rows, k_cache, v_cache, batch.block_tables, batch.context_lens, longest, rule).flatten(0, 1)
