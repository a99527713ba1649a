"""Causal paged attention of prompt chunks over their cached prefix (varlen batch, grouped-query heads).

The chunk's own keys and values are already written; the torch form reads prefix and chunk alike from the cache, so that
a chunked prompt sees exactly what a whole one would.
"""

import torch
import torch.nn.functional as F

from kernels.varlen import VarlenBatch


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, scale: float
) -> torch.Tensor:
    """q [tokens, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim] -> [tokens, heads, head_dim]."""
    pieces = torch.split(q, list(batch.host_q_lens))
    outputs = [
        _attend(piece, k_cache, v_cache, batch.block_tables[i], context_len, scale)
        for i, (piece, context_len) in enumerate(zip(pieces, batch.host_context_lens, strict=True))
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    scale: float,
) -> torch.Tensor:
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    blocks = block_table[: -(-context_len // block_size)]
    k = k_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[:context_len].transpose(0, 1).unsqueeze(0)
    v = v_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[:context_len].transpose(0, 1).unsqueeze(0)
    prefix = context_len - tokens
    mask = None
    if prefix and tokens > 1:  # query i may look at the prefix and at the chunk up to itself
        mask = torch.ones(tokens, context_len, dtype=torch.bool, device=q.device).tril(prefix)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=mask,
        is_causal=prefix == 0,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.squeeze(0).transpose(0, 1)
