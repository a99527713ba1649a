"""Attention whose softmax has one term more than there are keys: a learned score per head that takes weight and gives
no value, so that a head may attend to nothing.

Torch's fused attention has no such term; here scores are written out, in fp32, by callers who bound their size.
"""

import torch


def attention_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """q [seqs, kv_heads, group, rows, head_dim]: the query heads of each kv head; k, v [seqs, kv_heads, context,
    head_dim]; mask [seqs or 1, rows, context] says what a row sees; sinks [heads] -> like q."""
    seqs, kv_heads, group, rows, head_dim = q.shape
    # All rows that meet the same keys as one matrix: no key or value is repeated.
    scores = (q.reshape(seqs, kv_heads, group * rows, head_dim) @ k.transpose(-1, -2)).float() * scale
    scores = scores.view(seqs, kv_heads, group, rows, -1)
    scores.masked_fill_(~mask[:, None, None], -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks.float().view(kv_heads, group, 1, 1))
    weights = (scores - total).exp_().to(v.dtype)
    return (weights.view(seqs, kv_heads, group * rows, -1) @ v).view(q.shape)
