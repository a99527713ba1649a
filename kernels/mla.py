"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads of a token share one latent vector, which is
key and value at once, and one rotary key.

The cache holds both side by side, [num_blocks, block_size, latent + rotary] (512 + 64 in DeepSeek-V2 and V3). Queries arrive with the keys'
up-projection multiplied into them; the result is still latent, and the values' up-projection is the caller's. Refuses to know projections.
"""

import torch

from kernels import checks
from kernels.attention_rule import AttentionRule
from kernels.checks import FLOATS, Call, placed
from kernels.decode_attention import attend_by_torch as decode_by_torch
from kernels.device import triton_form
from kernels.paged import can_read, can_read_batch, check_blocks, look_at_batch, look_at_tables
from kernels.prefill_attention import attend_by_torch as prefill_by_torch
from kernels.varlen import VarlenBatch

_triton = triton_form("mla")


def mla_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """q_latent [seqs, heads, latent], q_rotary [seqs, heads, rotary]; cache [num_blocks, block_size, latent + rotary];
    tables and lengths as decode_attention's -> [seqs, heads, latent]."""
    if checks.DEBUG or not (
        _can_attend(q_latent, q_rotary, cache, scale)
        and can_read(q_latent, block_tables, context_lens, max_context_len, cache.shape[1])
    ):
        call = _look_at("mla_decode", "seqs", q_latent, q_rotary, cache, scale)
        look_at_tables(call, block_tables, context_lens, max_context_len, cache.shape[1])
        if checks.DEBUG:
            check_blocks("mla_decode", block_tables, context_lens, cache)
    if not q_latent.shape[0]:
        return torch.empty_like(q_latent)
    if q_latent.is_cuda and _triton is not None:
        return _triton.mla_decode(q_latent, q_rotary, cache, block_tables, context_lens, max_context_len, scale)
    q = torch.cat((q_latent, q_rotary), dim=-1)[:, None]
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return decode_by_torch(q, keys, values, block_tables, context_lens, max_context_len, AttentionRule(scale))[:, 0]


def mla_prefill(
    q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, batch: VarlenBatch, scale: float
) -> torch.Tensor:
    """q_latent [tokens, heads, latent], q_rotary [tokens, heads, rotary], causal over prefix and chunk as
    prefill_attention's -> [tokens, heads, latent]."""
    if checks.DEBUG or not (
        _can_attend(q_latent, q_rotary, cache, scale) and can_read_batch(q_latent, batch, cache.shape[1])
    ):
        call = _look_at("mla_prefill", "tokens", q_latent, q_rotary, cache, scale)
        look_at_batch(call, batch, q_latent.shape[0], cache.shape[1])
        if checks.DEBUG:
            check_blocks("mla_prefill", batch.block_tables, batch.context_lens, cache, "batch.")
    if not q_latent.shape[0]:
        return torch.empty_like(q_latent)
    if q_latent.is_cuda and _triton is not None:
        return _triton.mla_prefill(q_latent, q_rotary, cache, batch, scale)
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return prefill_by_torch(torch.cat((q_latent, q_rotary), dim=-1), keys, values, batch, AttentionRule(scale))


def _keys_and_values(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As one kv head of all heads."""
    one = cache.unsqueeze(2)
    return one, one[..., :latent]


def _can_attend(q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, scale: float) -> bool:
    return (
        q_latent.dim() == q_rotary.dim() == cache.dim() == 3
        and q_latent.dtype in FLOATS
        and q_latent.dtype == q_rotary.dtype == cache.dtype
        and q_latent.shape[:2] == q_rotary.shape[:2]
        and q_latent.shape[1] > 0
        and q_latent.shape[2] > 0
        and q_rotary.shape[2] > 0
        and q_latent.shape[2] + q_rotary.shape[2] == cache.shape[2]
        and q_latent.stride(2) == q_rotary.stride(2) == cache.stride(2) == 1
        and scale > 0
        and placed(q_latent, q_rotary, cache)
    )


def _look_at(
    operation: str, rows: str, q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, scale: float
) -> Call:
    call = Call(operation)
    call.tensor("q_latent", q_latent, f"{rows} heads latent", dense=1)
    call.tensor("q_rotary", q_rotary, f"{rows} heads rotary", (q_latent.dtype,), dense=1)
    call.derive("latent+rotary", call.size("latent") + call.size("rotary"), "q_latent and q_rotary")
    call.tensor("cache", cache, "blocks block_size latent+rotary", (q_latent.dtype,), dense=1)
    for name, size in (("heads", "heads"), ("latent", "values"), ("rotary", "rotary values")):
        call.require("q_rotary" if name == "rotary" else "q_latent", call.size(name) > 0, f"has no {size}")
    call.require("scale", scale > 0, f"is {scale}, wanted a positive number")
    return call
