"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads of a token share one latent vector, which is
key and value at once, and one rotary key.

The cache holds both side by side, [num_blocks, block_size, latent + rotary] (512 + 64 in DeepSeek-V2 and V3). Queries arrive with the keys'
up-projection multiplied into them; the result is still latent, and the values' up-projection is the caller's. Refuses to know projections.
"""

import torch

from kernels.decode_attention import Rule
from kernels.decode_attention import attend_by_torch as decode_by_torch
from kernels.device import triton_form
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
    if q_latent.is_cuda and _triton is not None:
        return _triton.mla_decode(q_latent, q_rotary, cache, block_tables, context_lens, max_context_len, scale)
    q = torch.cat((q_latent, q_rotary), dim=-1)[:, None]
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return decode_by_torch(q, keys, values, block_tables, context_lens, max_context_len, Rule(scale))[:, 0]


def mla_prefill(
    q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, batch: VarlenBatch, scale: float
) -> torch.Tensor:
    """q_latent [tokens, heads, latent], q_rotary [tokens, heads, rotary], causal over prefix and chunk as
    prefill_attention's -> [tokens, heads, latent]."""
    if q_latent.is_cuda and _triton is not None:
        return _triton.mla_prefill(q_latent, q_rotary, cache, batch, scale)
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return prefill_by_torch(torch.cat((q_latent, q_rotary), dim=-1), keys, values, batch, Rule(scale))


def _keys_and_values(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As one kv head of all heads."""
    one = cache.unsqueeze(2)
    return one, one[..., :latent]
