"""Attention with all scores in memory, for the rules that torch's fused attention does not support.

These are rules with sinks (a learned score per head that takes weight and adds no value, so that a head may attend to nothing), with soft caps
(scores saturate), or with keys and values in FP8. Scores are in fp32; callers bound their size.
"""

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.fp8_cache import is_fp8


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend under `mask`; return [seqs, kv_heads, group, rows, head_dim of v].

    q [seqs, kv_heads, group, rows, head_dim]: the query heads of each kv head; k, v [seqs, kv_heads, context, head_dim]; mask [seqs or 1, rows,
    context] is True if a row sees a key, and includes the rule's window.
    """
    scale, _, sinks, soft_cap, kv_scales, _ = rule
    seqs, kv_heads, group, rows, head_dim = q.shape
    # All rows that share keys form one matrix, so no key or value is repeated.
    scores = q.reshape(seqs, kv_heads, group * rows, head_dim).float() @ k.float().transpose(-1, -2)
    scores = scores.mul_(scale if kv_scales is None else scale * kv_scales[0]).view(seqs, kv_heads, group, rows, -1)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(~mask[:, None, None], -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(kv_heads, group, 1, 1))
    weights = (scores - total).exp_().view(seqs, kv_heads, group * rows, -1)
    out = weights @ v.float() if is_fp8(v) else weights.to(v.dtype) @ v
    if kv_scales is not None:
        out = out * kv_scales[1]
    return out.to(q.dtype).view(seqs, kv_heads, group, rows, -1)
