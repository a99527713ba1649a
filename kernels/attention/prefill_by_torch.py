"""The torch form of attention of prompt chunks.

It reads both prefix and chunk from the cache, so a chunked prompt is computed from the same numbers as a whole one.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.naive_attention import naive_attention
from pilotlight.kernels.attention.varlen import VarlenBatch

# Queries per tile of windowed attention. A tile attends only to the window and itself, so a prompt of n tokens costs n * (window + tile).
_TILE = 256
# Limit in bytes of the scores in memory at once where torch's fused attention cannot be used: 64 heads over 128k keys take 34 MB per query.
_SCORE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def attend_by_torch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Compute `prefill_attention` with torch; return [tokens, heads, head_dim of v]."""
    if not len(q):
        return q.new_empty((0, q.shape[1], v_cache.shape[3]))
    q_lens = list(batch.host_q_lens)
    ahead = [None] * len(q_lens) if batch.last_visible is None else torch.split(batch.last_visible, q_lens)
    outputs = [
        _attend(piece, k_cache, v_cache, batch.block_tables[i], context_len, rule, last_visible)
        for i, (piece, context_len, last_visible) in enumerate(
            zip(torch.split(q, q_lens), batch.host_context_lens, ahead, strict=True)
        )
        if len(piece)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    rule: AttentionRule,
    last_visible: torch.Tensor | None,
) -> torch.Tensor:
    tokens, heads, _ = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    window = rule.window
    if window is not None and window >= context_len:
        window = None
    # Blocks that lie before the first query's window are not read. From here on positions are counted from the first block that is read.
    skipped = 0 if window is None else max(0, context_len - tokens - window + 1) // block_size
    blocks = block_table[skipped : -(-context_len // block_size)]
    before = skipped * block_size
    context_len -= before
    k, v = (
        cache.index_select(0, blocks).view(-1, kv_heads, cache.shape[3])[:context_len].transpose(0, 1)
        for cache in (k_cache, v_cache)
    )
    if window is None and not rule.is_naive and last_visible is None:
        return _attend_fused(q, k, v, rule.scale)
    prefix = context_len - tokens
    rows = _TILE
    if rule.is_naive:
        keys = context_len
        if window is not None and last_visible is None:
            keys = min(context_len, window + _TILE)
        rows = max(1, min(_TILE, _SCORE_BYTES[q.device.type] // (4 * heads * keys)))
    outputs = []
    for start in range(0, tokens, rows):
        tile = q[start : start + rows]
        last = prefix + start + len(tile)  # keys up to the tile's last query
        end = last if last_visible is None else context_len
        first = 0 if window is None else max(0, prefix + start - window + 1)
        positions = torch.arange(before + prefix + start, before + last, device=q.device)
        ahead = None if last_visible is None else last_visible[start : start + rows]
        mask = _seen(positions, torch.arange(before + first, before + end, device=q.device), window, rule, ahead)
        outputs.append(_attend_tile(tile, k[:, first:end], v[:, first:end], mask, rule))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with torch's fused attention. q [tokens, heads, head_dim] is the end of the context.

    k, v [kv_heads, context, head_dim].
    """
    tokens, heads, _ = q.shape
    kv_heads, context_len, _ = k.shape
    prefix = context_len - tokens
    mask = None
    if prefix and tokens > 1:  # query i sees the prefix and the chunk up to itself
        mask = torch.ones(tokens, context_len, dtype=torch.bool, device=q.device).tril_(prefix)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=prefix == 0,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend as _attend_fused does, under `mask` [tokens, context]."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    if not rule.is_naive:
        queries = q.transpose(0, 1).unsqueeze(0)
        gqa = heads != kv_heads
        out = F.scaled_dot_product_attention(
            queries, k[None], v[None], attn_mask=mask, scale=rule.scale, enable_gqa=gqa
        )
        return out.squeeze(0).transpose(0, 1)
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    out = naive_attention(grouped[None], k[None], v[None], mask[None], rule)
    return out.squeeze(0).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _seen(
    positions: torch.Tensor,
    keys: torch.Tensor,
    window: int | None,
    rule: AttentionRule,
    last_visible: torch.Tensor | None,
) -> torch.Tensor:
    """Return the mask [queries, keys] of the keys that each query sees.

    `positions` [queries], `keys`: positions in the context; `window`: the rule's, or None if all keys are in it.
    """
    last = positions if last_visible is None else torch.maximum(positions, last_visible)
    mask = keys <= last.unsqueeze(1)
    if window is not None:
        first = positions // window * window if rule.is_chunked else positions - window + 1
        mask &= keys >= first.unsqueeze(1)
    return mask
