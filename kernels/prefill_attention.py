"""Causal paged attention of prompt chunks over their cached prefix (varlen batch, grouped-query heads), or over the
last tokens of it.

The chunk's own keys and values are already written; the torch form reads prefix and chunk alike from the cache, so that
a chunked prompt sees exactly what a whole one would.
"""

import torch
import torch.nn.functional as F

from kernels import checks
from kernels.checks import Call, placed
from kernels.cpu import ops as cpu
from kernels.device import triton_form
from kernels.paged import can_attend, check_blocks, look_at_cache, look_at_queries
from kernels.sinks import attention_with_sinks
from kernels.varlen import VarlenBatch

_triton = triton_form("prefill_attention")

# Queries that go through a window at once: a tile meets the window and itself only, so that a long prompt costs
# tokens * (window + tile).
_TILE = 256
# Scores that are written out at once, with sinks: 64 heads over 128k keys are 34 MB for each query.
_SCORE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; window: the last tokens that a
    query sees, itself included; sinks [heads] -> [tokens, heads, head_dim]."""
    _check(q, k_cache, v_cache, batch, window, sinks)
    if not q.shape[0]:
        return torch.empty_like(q)
    if q.is_cuda and _triton is not None:
        return _triton.prefill_attention(q, k_cache, v_cache, batch, scale, window, sinks)
    if q.is_cpu and (out := cpu.prefill_attention(q, k_cache, v_cache, batch, scale, window, sinks)) is not None:
        return out
    pieces = torch.split(q, list(batch.host_q_lens))
    outputs = [
        _attend(piece, k_cache, v_cache, batch.block_tables[i], context_len, scale, window, sinks)
        for i, (piece, context_len) in enumerate(zip(pieces, batch.host_context_lens, strict=True))
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """What the host knows of the lengths is summed up here too: a prompt's step is long enough for that."""
    seqs = len(batch.host_q_lens)
    if checks.DEBUG or not (
        can_attend(q, k_cache, v_cache, window, sinks)
        and batch.block_tables.dim() == 2
        and batch.block_tables.shape[0] == seqs
        and batch.context_lens.shape == (seqs,)
        and batch.block_tables.stride(1) == 1
        and batch.block_tables.dtype == torch.int64
        and batch.cu_seqlens_q.shape == (seqs + 1,)
        and batch.cu_seqlens_q.dtype == batch.context_lens.dtype == torch.int32
        and batch.cu_seqlens_q.is_contiguous()
        and batch.context_lens.is_contiguous()
        and len(batch.host_context_lens) == seqs
        and sum(batch.host_q_lens) == q.shape[0]
        and all(0 < tokens <= context for tokens, context in zip(*batch[-2:], strict=True))
        and max(batch.host_context_lens, default=0) <= batch.block_tables.shape[1] * k_cache.shape[1]
        and placed(q, batch.block_tables, batch.cu_seqlens_q, batch.context_lens)
    ):
        _look_at(q, k_cache, v_cache, batch, window, sinks)


def _look_at(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: VarlenBatch,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    operation = "prefill_attention"
    call = Call(operation)
    look_at_cache(call, k_cache, v_cache)
    look_at_queries(call, q, "tokens", k_cache, window, sinks)
    call.tensor("batch.block_tables", batch.block_tables, "seqs _", (torch.int64,), dense=1)
    call.derive("seqs+1", batch.block_tables.shape[0] + 1, "batch.block_tables")
    call.tensor("batch.cu_seqlens_q", batch.cu_seqlens_q, "seqs+1", (torch.int32,), dense=1)
    call.tensor("batch.context_lens", batch.context_lens, "seqs", (torch.int32,), dense=1)
    seqs, room = batch.block_tables.shape[0], batch.block_tables.shape[1] * k_cache.shape[1]
    for name, lens in (("batch.host_q_lens", batch.host_q_lens), ("batch.host_context_lens", batch.host_context_lens)):
        call.require(name, len(lens) == seqs, f"has {len(lens)} lengths, and batch.block_tables {seqs} rows")
    total = sum(batch.host_q_lens)
    call.require("batch.host_q_lens", total == q.shape[0], f"sums to {total}, and q has {q.shape[0]} tokens")
    for tokens, context in zip(batch.host_q_lens, batch.host_context_lens, strict=True):
        call.require("batch.host_q_lens", tokens > 0 or not total, f"holds {tokens}: every sequence has a query")
        fits = tokens <= context <= room
        call.require(
            "batch.host_context_lens", fits, f"holds {context}, wanted {tokens} (its queries) to {room} (its table)"
        )
    if checks.DEBUG:
        check_blocks(operation, batch.block_tables, batch.context_lens, k_cache, "batch.")


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if window is not None and window >= context_len:
        window = None
    # Blocks before the first query's window are not read; positions are counted from the first that is.
    skipped = 0 if window is None else max(0, context_len - tokens - window + 1) // block_size
    blocks = block_table[skipped : -(-context_len // block_size)]
    context_len -= skipped * block_size
    k = k_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[:context_len].transpose(0, 1)
    v = v_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[:context_len].transpose(0, 1)
    if window is None and sinks is None:
        return _attend_fused(q, k, v, scale)
    prefix = context_len - tokens
    rows = _TILE
    if sinks is not None:
        keys = context_len if window is None else min(context_len, window + _TILE)
        rows = max(1, min(_TILE, _SCORE_BYTES[q.device.type] // (4 * heads * keys)))
    outputs = []
    for start in range(0, tokens, rows):
        tile = q[start : start + rows]
        end = prefix + start + len(tile)  # keys up to the tile's last query
        first = 0 if window is None else max(0, prefix + start - window + 1)
        mask = _causal(len(tile), end - first, window, q.device)
        outputs.append(_attend_tile(tile, k[:, first:end], v[:, first:end], mask, scale, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [tokens, heads, head_dim], the last of the context; k, v [kv_heads, context, head_dim]."""
    tokens, heads, _ = q.shape
    kv_heads, context_len, _ = k.shape
    prefix = context_len - tokens
    mask = None
    if prefix and tokens > 1:  # query i may look at the prefix and at the chunk up to itself
        mask = _causal(tokens, context_len, None, q.device)
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """As _attend_fused, where `mask` [tokens, context] says what is seen."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    if sinks is None:
        queries = q.transpose(0, 1).unsqueeze(0)
        gqa = heads != kv_heads
        out = F.scaled_dot_product_attention(queries, k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=gqa)
        return out.squeeze(0).transpose(0, 1)
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    out = attention_with_sinks(grouped[None], k[None], v[None], mask[None], scale, sinks)
    return out.squeeze(0).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def _causal(tokens: int, context_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[tokens, context_len]: the queries are the last of the context."""
    mask = torch.ones(tokens, context_len, dtype=torch.bool, device=device).tril_(context_len - tokens)
    return mask if window is None else mask.triu_(context_len - tokens - window + 1)
