"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads of a token share one latent vector, which is
key and value at once, and one rotary key.

The cache holds both side by side, [num_blocks, block_size, latent + rotary] (512 + 64 in DeepSeek-V2 and V3). Queries arrive with the keys'
up-projection multiplied into them; the result is still latent, and the values' up-projection is the caller's. Refuses to know projections.
No model of the engine uses it yet.
"""

import torch

from kernels import checks
from kernels.attention_rule import AttentionRule
from kernels.checks import FLOATS, ArgumentCheck, placed
from kernels.decode_attention import attend_by_torch as decode_by_torch
from kernels.dispatch import operation
from kernels.paged import can_read, can_read_batch, check_blocks, require_batch, require_tables
from kernels.prefill_attention import attend_by_torch as prefill_by_torch
from kernels.varlen import VarlenBatch


def _check_decode(
    operation: str,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> None:
    if checks.DEBUG or not (
        _can_attend(q_latent, q_rotary, cache, scale)
        and can_read(q_latent, block_tables, context_lens, max_context_len, cache.shape[1])
    ):
        check = _require(operation, "seqs", q_latent, q_rotary, cache, scale)
        require_tables(check, block_tables, context_lens, max_context_len, cache.shape[1])
        if checks.DEBUG:
            check_blocks(operation, block_tables, context_lens, cache)


def _check_prefill(
    operation: str,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
) -> None:
    if checks.DEBUG or not (
        _can_attend(q_latent, q_rotary, cache, scale) and can_read_batch(q_latent, batch, cache.shape[1])
    ):
        check = _require(operation, "tokens", q_latent, q_rotary, cache, scale)
        require_batch(check, batch, q_latent.shape[0], cache.shape[1])
        if checks.DEBUG:
            check_blocks(operation, batch.block_tables, batch.context_lens, cache, "batch.")


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


def _require(
    operation: str, rows: str, q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, scale: float
) -> ArgumentCheck:
    check = ArgumentCheck(operation)
    check.tensor("q_latent", q_latent, f"{rows} heads latent", dense=1)
    check.tensor("q_rotary", q_rotary, f"{rows} heads rotary", (q_latent.dtype,), dense=1)
    check.derive("latent+rotary", check.size("latent") + check.size("rotary"), "q_latent and q_rotary")
    check.tensor("cache", cache, "blocks block_size latent+rotary", (q_latent.dtype,), dense=1)
    for name, size in (("heads", "heads"), ("latent", "values"), ("rotary", "rotary values")):
        check.require("q_rotary" if name == "rotary" else "q_latent", check.size(name) > 0, f"has no {size}")
    check.require("scale", scale > 0, f"is {scale}, wanted a positive number")
    return check


@operation(_check_decode, triton="mla")
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
    if not q_latent.shape[0]:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rotary), dim=-1)[:, None]
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return decode_by_torch(q, keys, values, block_tables, context_lens, max_context_len, AttentionRule(scale))[:, 0]


@operation(_check_prefill, triton="mla")
def mla_prefill(
    q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, batch: VarlenBatch, scale: float
) -> torch.Tensor:
    """q_latent [tokens, heads, latent], q_rotary [tokens, heads, rotary], causal over prefix and chunk as
    prefill_attention's -> [tokens, heads, latent]."""
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return prefill_by_torch(torch.cat((q_latent, q_rotary), dim=-1), keys, values, batch, AttentionRule(scale))


def _keys_and_values(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache as the keys and the values of one kv head."""
    one = cache.unsqueeze(2)
    return one, one[..., :latent]
