"""Paged attention of one new token per sequence over everything the sequence has cached (grouped-query heads), or over
the last tokens of it.

The torch form gathers each sequence's blocks into a padded copy. The copy is bounded, so a batch of long sequences is
worked off in groups; blocks that lie wholly before a window are not gathered.
"""

import torch
import torch.nn.functional as F

from kernels import checks
from kernels.checks import Call, placed
from kernels.cpu import ops
from kernels.device import triton_form
from kernels.paged import can_attend, check_blocks, look_at_cache, look_at_queries
from kernels.sinks import attention_with_sinks

_triton = triton_form("decode_attention")

# Bytes of keys and values gathered at once. On a CPU the copy should stay in a core's cache: 64 sequences of 310
# tokens took 2.3 ms in groups of 2 MiB and 6.9 ms in one. On a GPU the copy only has to leave room for the rest.
_GATHERED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [seqs, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; block_tables [seqs, max_blocks]
    int64, padded with any valid block; context_lens [seqs] int64 counts the new token, which is already written;
    max_context_len is their maximum, known to the host, or all that the tables hold (a recorded graph knows no more);
    window: the last tokens seen, the new one included; sinks [heads]. Returns [seqs, heads, head_dim].

    Padded positions are masked, not skipped: whatever lies in them must be finite (0 * NaN is NaN), which the arena
    guarantees.
    """
    if checks.DEBUG:
        _look_at(q, k_cache, v_cache, block_tables, context_lens, max_context_len, window, sinks)
        check_blocks("decode_attention", block_tables, context_lens, k_cache)
    native = ops.decode_attention(q, k_cache, v_cache, block_tables, context_lens, scale, window, sinks)
    if native is not None:
        return native
    if not (
        can_attend(q, k_cache, v_cache, window, sinks)
        and block_tables.dim() == 2
        and block_tables.shape[0] == q.shape[0]
        and block_tables.stride(1) == 1
        and context_lens.shape == q.shape[:1]
        and context_lens.is_contiguous()
        and block_tables.dtype == context_lens.dtype == torch.int64
        and 0 < max_context_len <= block_tables.shape[1] * k_cache.shape[1]
        and placed(q, block_tables, context_lens)
    ):
        _look_at(q, k_cache, v_cache, block_tables, context_lens, max_context_len, window, sinks)
    seqs = q.shape[0]
    if not seqs:
        return torch.empty_like(q)
    if q.is_cuda and _triton is not None:
        return _triton.decode_attention(
            q, k_cache, v_cache, block_tables, context_lens, max_context_len, scale, window, sinks
        )
    if window is not None and window >= max_context_len:
        window = None
    if window is not None:
        block_tables, context_lens = _last_blocks(block_tables, context_lens, window, k_cache.shape[1])
        max_context_len = min(max_context_len, block_tables.shape[1] * k_cache.shape[1])
    # One sequence without padding has nothing to mask.
    visible = None
    if (
        seqs > 1
        or window is not None
        or sinks is not None
        or max_context_len == block_tables.shape[1] * k_cache.shape[1]
    ):
        visible = _visible(context_lens, max_context_len, window)
    bytes_per_seq = 2 * block_tables.shape[1] * k_cache[0].numel() * k_cache.element_size()
    group = max(1, _GATHERED_BYTES[q.device.type] // bytes_per_seq)
    if seqs <= group or visible is None:
        return _attend(q, k_cache, v_cache, block_tables, visible, max_context_len, scale, sinks)
    parts = zip(torch.split(q, group), torch.split(block_tables, group), torch.split(visible, group), strict=True)
    return torch.cat(
        [_attend(q, k_cache, v_cache, tables, seen, max_context_len, scale, sinks) for q, tables, seen in parts]
    )


def _look_at(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    call = Call("decode_attention")
    look_at_cache(call, k_cache, v_cache)
    look_at_queries(call, q, "seqs", k_cache, window, sinks)
    call.tensor("block_tables", block_tables, "seqs _", (torch.int64,), dense=1)
    call.tensor("context_lens", context_lens, "seqs", (torch.int64,), dense=1)
    room = block_tables.shape[1] * k_cache.shape[1]
    fits = 0 < max_context_len <= room or not q.shape[0]
    call.require("max_context_len", fits, f"is {max_context_len}, and the tables hold 1 to {room} tokens")


def _last_blocks(
    block_tables: torch.Tensor, context_lens: torch.Tensor, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that hold each sequence's last `window` tokens, and the lengths counted from the first of them."""
    num_blocks = min(block_tables.shape[1], (window - 2) // block_size + 2)  # so many can `window` tokens touch
    first = (context_lens - window).clamp(min=0) // block_size
    index = first.unsqueeze(1) + torch.arange(num_blocks, device=block_tables.device)
    # what would lie beyond the table lies beyond the context too, and is masked
    tables = block_tables.gather(1, index.clamp(max=block_tables.shape[1] - 1))
    return tables, context_lens - first * block_size


def _visible(context_lens: torch.Tensor, max_context_len: int, window: int | None) -> torch.Tensor:
    """[seqs, max_context_len]"""
    positions = torch.arange(max_context_len, device=context_lens.device)
    ends = context_lens.unsqueeze(1)
    visible = positions < ends
    return visible if window is None else visible & (positions >= ends - window)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    visible: torch.Tensor | None,
    max_context_len: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    seqs, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    flat = block_tables.reshape(-1)
    shape = (seqs, block_tables.shape[1] * block_size, kv_heads, head_dim)
    k = k_cache.index_select(0, flat).view(shape)[:, :max_context_len].transpose(1, 2)
    v = v_cache.index_select(0, flat).view(shape)[:, :max_context_len].transpose(1, 2)
    # The query heads of one kv head become the rows of one small matrix: no key or value is repeated.
    grouped = q.view(seqs, kv_heads, heads // kv_heads, head_dim)
    if sinks is not None:
        assert visible is not None
        out = attention_with_sinks(grouped.unsqueeze(3), k, v, visible.unsqueeze(1), scale, sinks)
        return out.reshape(seqs, heads, head_dim)
    mask = None if visible is None else visible.view(seqs, 1, 1, max_context_len)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(seqs, heads, head_dim)
