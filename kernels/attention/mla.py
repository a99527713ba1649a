"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

All heads of a token share one latent vector, which serves as key and value, and one rotary key. The cache holds both side by side, [num_blocks,
block_size, latent + rotary] (512 + 64 in DeepSeek-V2 and V3), or in FP8 with one scale for all numbers. The caller multiplies queries by the keys'
up-projection before, and the latent result by the values' up-projection afterwards; this module does not know projections.
"""

from typing import Any

import torch
import torch.nn.functional as F

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import attend_by_torch as decode_by_torch
from pilotlight.kernels.attention.fp8_cache import FP8, quantize
from pilotlight.kernels.attention.paged import (
    check_slots,
    require_batch,
    require_tables,
    require_tables_of_tokens,
)
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch as prefill_by_torch
from pilotlight.kernels.attention.selected_rows import copied
from pilotlight.kernels.attention.varlen import FEW_QUERIES, VarlenBatch
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.rotary import turned


def _check_decode(
    check: ArgumentCheck,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> None:
    _require(check, "seqs", q_latent, q_rotary, cache, scale, cache_scale)
    require_tables(check, block_tables, context_lens, max_context_len, cache)


def _check_prefill(
    check: ArgumentCheck,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> None:
    _require(check, "tokens", q_latent, q_rotary, cache, scale, cache_scale)
    require_batch(check, batch, q_latent.shape[0], cache)


def _check_selected(
    check: ArgumentCheck,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    num_read: torch.Tensor,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> None:
    _require(check, "tokens", q_latent, q_rotary, cache, scale, cache_scale)
    check.tensor("positions", positions, "tokens _", (torch.int64,), dense=1)
    check.require("positions", positions.shape[1] > 0, "has no column")
    require_tables_of_tokens(check, block_tables, q_latent.shape[0])
    check.tensor("num_read", num_read, "tokens", (torch.int64,), dense=1)
    room = block_tables.shape[1] * cache.shape[1]
    check.indices("block_tables", block_tables, cache.shape[0], "the cache's blocks")
    check.indices("positions", positions, room, "the capacity of a table")
    check.indices("num_read", num_read, positions.shape[1] + 1, "the columns of positions", begin=1)


def _native_prefill(
    library: Library,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute a few queries per sequence with C, each like a decode.

    Return None for more queries: torch reads each key once for all of them.
    """
    if not batch.host_q_lens or max(batch.host_q_lens) > FEW_QUERIES:
        return None
    tables, visible = batch.of_tokens()
    return ops.latent_attention(library, q_latent, q_rotary, cache, tables, None, visible, scale, cache_scale)


def _native_decode(
    library: Library,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    *scales: Any,
) -> torch.Tensor | None:
    return ops.latent_attention(library, q_latent, q_rotary, cache, block_tables, None, context_lens, *scales)


def _require_cache(
    check: ArgumentCheck, cache: torch.Tensor, cache_scale: torch.Tensor | None, dtype: torch.dtype
) -> None:
    check.require(
        "cache_scale", cache_scale is not None or cache.dtype != FP8, "is missing: a cache in FP8 has a scale"
    )
    kinds = (dtype if cache_scale is None else FP8,)
    check.tensor("cache", cache, "blocks block_size latent+rotary", kinds, dense=1)
    if cache_scale is not None:
        check.tensor("cache_scale", cache_scale, "1", (torch.float32,))


def _require(
    check: ArgumentCheck,
    rows: str,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    cache_scale: torch.Tensor | None,
) -> None:
    check.tensor("q_latent", q_latent, f"{rows} heads latent", dense=1)
    check.tensor("q_rotary", q_rotary, f"{rows} heads rotary", (q_latent.dtype,), dense=1)
    check.derive("latent+rotary", check.size("latent") + check.size("rotary"), "q_latent and q_rotary")
    _require_cache(check, cache, cache_scale, q_latent.dtype)
    for name, size in (("heads", "heads"), ("latent", "values"), ("rotary", "rotary values")):
        check.require("q_rotary" if name == "rotary" else "q_latent", check.size(name) > 0, f"has no {size}")
    check.require("scale", scale > 0, f"is {scale}, wanted a positive number")


def _check_write(
    check: ArgumentCheck,
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_scale: torch.Tensor | None = None,
) -> None:
    check.tensor("x", x, "tokens latent+rotary", dense=1)
    _require_cache(check, cache, cache_scale, x.dtype)
    check.tensor("norm", norm, "latent", (x.dtype, torch.float32), dense=1)
    rotary = x.shape[1] - norm.shape[0]
    fits = norm.shape[0] > 0 and rotary > 0 and rotary % 2 == 0
    check.require(
        "norm",
        fits,
        f"covers {norm.shape[0]} of {x.shape[1]} values; the others are rotated in pairs, so their number must be even",
    )
    check.derive("rotary/2", rotary // 2, "x and norm")
    for name, values in (("cos", cos), ("sin", sin)):
        check.tensor(name, values, "tokens rotary/2", (torch.float32,), dense=1)
    check.tensor("slot_mapping", slot_mapping, "tokens", (torch.int64,), dense=1)
    check_slots(check, slot_mapping, cache)


@operation(_check_write, triton="attention.mla")
def mla_write(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Normalise the latent vectors, rotate the rotary keys, and write both to the cache.

    x [tokens, latent + rotary] as projected; norm [latent]; cos and sin [tokens, rotary / 2] fp32; slot_mapping [tokens] int64; cache [num_blocks,
    block_size, latent + rotary]; cache_scale [1] fp32, for a cache in FP8: the factor by which stored numbers are multiplied. The two values of a
    rotated pair are adjacent.
    """
    latent, rotary = x[:, : norm.shape[0]], x[:, None, norm.shape[0] :]
    normed = (F.rms_norm(latent.float(), norm.shape, None, eps) * norm).to(x.dtype)
    key = turned(rotary, cos, sin, is_interleaved=True).squeeze(1)
    block_size = cache.shape[1]
    rows = torch.cat((normed, key), dim=1)
    if cache_scale is not None:  # torch can index bytes but not FP8 tensors
        rows, cache = quantize(rows, cache_scale).view(torch.uint8), cache.view(torch.uint8)
    cache[slot_mapping // block_size, slot_mapping % block_size] = rows


@operation(_check_decode, triton="attention.mla", native=_native_decode)
def mla_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one query per sequence; return [seqs, heads, latent].

    q_latent [seqs, heads, latent], q_rotary [seqs, heads, rotary]; cache [num_blocks, block_size, latent + rotary]; tables and lengths as in
    decode_attention; cache_scale as in mla_write.
    """
    if not q_latent.shape[0]:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rotary), dim=-1)[:, None]
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    rule = _rule(scale, cache_scale)
    return decode_by_torch(q, keys, values, block_tables, context_lens, max_context_len, rule)[:, 0]


@operation(_check_prefill, triton="attention.mla", native=_native_prefill)
def mla_prefill(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally as prefill_attention does, to latent vectors; return [tokens, heads, latent].

    q_latent [tokens, heads, latent], q_rotary [tokens, heads, rotary]; cache and cache_scale as in mla_decode.
    """
    keys, values = _keys_and_values(cache, q_latent.shape[2])
    return prefill_by_torch(torch.cat((q_latent, q_rotary), dim=-1), keys, values, batch, _rule(scale, cache_scale))


@operation(_check_selected, triton="attention.mla", native=ops.latent_attention)
def mla_selected(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    num_read: torch.Tensor,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each token to its selected keys; return [tokens, heads, latent].

    A token reads the keys at its first `num_read` positions. q_latent [tokens, heads, latent], q_rotary [tokens, heads, rotary]; block_tables
    [tokens, max_blocks] int64, or one row if all tokens are of one sequence; positions [tokens, top_k] int64, all in the table; num_read [tokens]
    int64, from 1 to top_k; cache and cache_scale as in mla_decode.
    """
    return mla_decode(
        q_latent, q_rotary, *copied(cache, block_tables, positions, num_read, q_latent.dtype, cache_scale), scale
    )


def _rule(scale: float, cache_scale: torch.Tensor | None) -> AttentionRule:
    return AttentionRule(scale, kv_scales=None if cache_scale is None else cache_scale.expand(2))


def _keys_and_values(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache as the keys and the values of a single kv head."""
    one = cache.unsqueeze(2)
    return one, one[..., :latent]
