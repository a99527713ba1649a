"""Paged attention of one new token per sequence over its cached context or a window of it.

Heads are grouped (GQA). The torch form, which also takes several new tokens per sequence, gathers each sequence's blocks into a padded copy. The copy
is bounded, so a batch of long sequences is processed in groups; blocks that lie entirely before a window are not gathered.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.naive_attention import naive_attention
from pilotlight.kernels.attention.paged import (
    require_cache,
    require_queries,
    require_tables,
)
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation

# Limit in bytes of the keys and values gathered at once. On a CPU the copy should stay in a core's cache: 64 sequences of 310 tokens took 2.3 ms in
# groups of 2 MiB, and 6.9 ms in a single group. On a GPU the limit only keeps the copy from filling memory.
_GATHERED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def _check(
    check: ArgumentCheck,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> None:
    require_cache(check, k_cache, v_cache, rule.kv_scales, "rule.kv_scales")
    require_queries(check, q, "seqs", k_cache, rule)
    require_tables(check, block_tables, context_lens, max_context_len, k_cache)


@operation(_check, triton="attention.decode_attention", native=ops.decode_attention, guards_itself=True)
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attend from one query per sequence; return [seqs, heads, head_dim].

    q [seqs, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; block_tables [seqs, max_blocks] int64, padded with any valid
    block; context_lens [seqs] int64 includes the new token, whose key and value are already written. max_context_len is the maximum of context_lens
    if the host knows it, else the capacity of the tables (in a recorded graph).

    Padded positions are masked, not skipped, so their contents must be finite (0 * NaN is NaN); the arena guarantees that.
    """
    if not q.shape[0]:
        return torch.empty_like(q)
    return attend_by_torch(q[:, None], k_cache, v_cache, block_tables, context_lens, max_context_len, rule)[:, 0]


def attend_by_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    rule: AttentionRule,
    gathered_bytes: int = 0,
) -> torch.Tensor:
    """Attend from the last tokens of each context.

    q [seqs, queries, heads, head_dim] -> [seqs, queries, heads, head_dim of v]. `gathered_bytes`: overrides the device's limit of gathered bytes.
    """
    seqs, queries = q.shape[:2]
    window = rule.window
    if window is not None and window >= max_context_len:
        window = None
    skipped = torch.zeros_like(context_lens)
    if window is not None:
        whole = context_lens
        block_tables, context_lens = _last_blocks(block_tables, whole, window + queries - 1, k_cache.shape[1])
        skipped = whole - context_lens
        max_context_len = min(max_context_len, block_tables.shape[1] * k_cache.shape[1])
    # A single sequence without padding needs no mask.
    visible = None
    if (
        seqs > 1
        or queries > 1
        or window is not None
        or rule.is_naive
        or max_context_len == block_tables.shape[1] * k_cache.shape[1]
    ):
        visible = _visible(context_lens, queries, max_context_len, window, skipped if rule.is_chunked else None)
    bytes_per_seq = 2 * block_tables.shape[1] * k_cache[0].numel() * k_cache.element_size()
    group = max(1, (gathered_bytes or _GATHERED_BYTES[q.device.type]) // bytes_per_seq)
    if seqs <= group or visible is None:
        return _attend(q, k_cache, v_cache, block_tables, visible, max_context_len, rule)
    parts = zip(torch.split(q, group), torch.split(block_tables, group), torch.split(visible, group), strict=True)
    return torch.cat([_attend(q, k_cache, v_cache, tables, seen, max_context_len, rule) for q, tables, seen in parts])


def _last_blocks(
    block_tables: torch.Tensor, context_lens: torch.Tensor, tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks that hold each sequence's last `tokens` tokens, and the lengths within them."""
    num_blocks = min(block_tables.shape[1], (tokens - 2) // block_size + 2)  # most blocks that `tokens` tokens span
    first = (context_lens - tokens).clamp(min=0) // block_size
    index = first.unsqueeze(1) + torch.arange(num_blocks, device=block_tables.device)
    # positions past the end of the table lie past the context, and are masked
    tables = block_tables.gather(1, index.clamp(max=block_tables.shape[1] - 1))
    return tables, context_lens - first * block_size


def _visible(
    context_lens: torch.Tensor, queries: int, max_context_len: int, window: int | None, skipped: torch.Tensor | None
) -> torch.Tensor:
    """Return the mask [seqs, queries, max_context_len].

    `skipped` [seqs]: the number of tokens before the gathered ones; the borders of chunks depend on it.
    """
    positions = torch.arange(max_context_len, device=context_lens.device)
    ends = context_lens.view(-1, 1, 1)
    if queries > 1:
        ends = ends - torch.arange(queries - 1, -1, -1, device=context_lens.device).view(-1, 1)
    visible = positions < ends
    if window is None:
        return visible
    begins = ends - window
    if skipped is not None:
        before = skipped.view(-1, 1, 1)
        begins = (ends + before - 1) // window * window - before
    return visible & (positions >= begins)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    visible: torch.Tensor | None,
    max_context_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    seqs, queries, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    flat, room = block_tables.reshape(-1), block_tables.shape[1] * block_size
    k = k_cache.index_select(0, flat).view(seqs, room, kv_heads, -1)[:, :max_context_len].transpose(1, 2)
    v = v_cache.index_select(0, flat).view(seqs, room, kv_heads, -1)[:, :max_context_len].transpose(1, 2)
    # The query heads of one kv head become the rows of one small matrix: no key or value is repeated.
    group = heads // kv_heads
    if queries == 1 and not rule.is_naive:
        rows, mask = q.view(seqs, kv_heads, group, head_dim), None if visible is None else visible[:, None]
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=rule.scale)
        return out.reshape(seqs, 1, heads, -1)
    assert visible is not None
    grouped = q.view(seqs, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    if rule.is_naive:
        out = naive_attention(grouped, k, v, visible, rule)
    else:
        rows, mask = grouped.reshape(seqs, kv_heads, -1, head_dim), visible[:, None].repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=rule.scale)
    return out.view(seqs, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).reshape(seqs, queries, heads, -1)
