"""The catalogue's entries of paged attention: decode, prefill and verify over grouped heads, and MLA."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from load_tests.catalogue.paged_cases import Heads, empty_arena, gathered, paged, varlen
from pilotlight.kernels.attention import decode_attention, key_index, mla, prefill_attention, verify_attention
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.attention.varlen import VarlenBatch

_READ = Target(0.9, "read")
_COPY = Target(0.85, "copy")
_FUSED = Target(0.65, "rival")
_ROWS = 1024  # queries whose scores the formula holds in memory at once

Lens = tuple[int, ...]


def _options(heads: Heads, scale: float, options: dict[str, Any]) -> Arguments:
    """Return a case's AttentionRule. Options: window, soft_cap, and the flags is_chunked, sinks, fp8."""
    sinks = torch.randn(heads.heads) if options.get("sinks") else None
    # powers of two would not reveal a scale that is applied twice or to the wrong operand
    kv_scales = torch.tensor([0.7, 1.9]) if options.get("fp8") else None
    window, is_chunked = options.get("window"), options.get("is_chunked", False)
    return {"rule": AttentionRule(scale, window, sinks, options.get("soft_cap"), kv_scales, is_chunked)}


def _named(heads: Heads, lens: Lens, q_lens: Lens | int | None, options: dict[str, Any]) -> str:
    """Return a case's name; a long batch is named by its size and longest context."""
    batch = str(lens) if len(lens) < 6 else f"{len(lens)} of {max(lens)}"
    queries = "" if q_lens is None else f", queries {q_lens}"
    return f"{heads}, contexts {batch}{queries}" + "".join(f", {name} {value}" for name, value in options.items())


def _decode(heads: Heads, lens: Lens, target: Target | None = None, layers: int = 2, **options: Any) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        q = torch.randn(len(lens), heads.heads, heads.head_dim).to(dtype)
        return _over_cache(q, heads, lens, dtype, layers, options)

    return Case(_named(heads, lens, None, options), make, target)


def _over_cache(
    q: Tensor, heads: Heads, lens: Lens, dtype: torch.dtype, layers: int, options: dict[str, Any]
) -> Arguments:
    cache = paged(lens, heads, FP8 if options.get("fp8") else dtype, layers)
    made: Arguments = {"q": q, **cache._asdict(), "max_context_len": max(lens, default=0)}
    return made | _options(heads, options.get("scale", heads.head_dim**-0.5), options)


def _prefill(
    heads: Heads,
    q_lens: Lens,
    lens: Lens,
    target: Target | None = None,
    layers: int = 2,
    in_order: bool = False,
    **options: Any,
) -> Case:
    """Make a case.

    `in_order`: blocks are contiguous, so that torch's own attention can read them. Option images: as in `varlen`.
    """

    def make(dtype: torch.dtype) -> Arguments:
        k_cache, v_cache, tables, _ = paged(lens, heads, FP8 if options.get("fp8") else dtype, layers, in_order)
        if in_order:
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        q = torch.randn(sum(q_lens), heads.heads, heads.head_dim).to(dtype)
        batch = varlen(tables, q_lens, lens, options.get("images", ()))
        made: Arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "batch": batch}
        return made | _options(heads, options.get("scale", heads.head_dim**-0.5), options)

    return Case(_named(heads, lens, q_lens, options), make, target)


def _verify(heads: Heads, lens: Lens, *queries: int, target: Target | None = None, **options: Any) -> Case:
    """Make a case. `queries`: the number of queries per sequence, or one number for all."""
    q_lens = queries * len(lens) if len(queries) == 1 else queries
    return _prefill(heads, q_lens, lens, target, 2 if target is None else 1, **options)


def _attended(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, last_visible: Tensor | None = None) -> Tensor:
    """Compute the formula for one sequence.

    q [queries, heads, dim], the last tokens of the context; k [context, kv_heads, dim]; v [context, kv_heads, dim of v]. `last_visible`: as in
    VarlenBatch.
    """
    scale, window, sinks, soft_cap, kv_scales, is_chunked = rule
    if kv_scales is not None:
        k, v = k * kv_scales[0], v * kv_scales[1]
    group = q.shape[1] // k.shape[1]
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    at = torch.arange(len(k), device=q.device)
    for first in range(0, len(q), _ROWS):
        rows = q[first : first + _ROWS]
        position = len(k) - len(q) + first + torch.arange(len(rows), device=q.device).unsqueeze(1)
        ahead = position if last_visible is None else last_visible[first : first + _ROWS].unsqueeze(1)
        unseen = (at > position) & (at > ahead)
        if window is not None:
            unseen = unseen | (at // window < position // window if is_chunked else at <= position - window)
        for head in range(q.shape[1]):
            scores = rows[:, head] @ k[:, head // group].T * scale
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            scores = scores.masked_fill(unseen, -torch.inf)
            if sinks is not None:  # one more key, which has a score and no value
                scores = torch.cat((scores, sinks[head].expand(len(rows), 1)), dim=1)
            out[first : first + _ROWS, head] = scores.softmax(1)[:, : len(k)] @ v[:, head // group]
    return out


def _each(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lens: Lens,
    q_lens: Lens,
    rule: AttentionRule,
    last_visible: Tensor | None = None,
) -> Tensor:
    """Compute the formula for each sequence. q [tokens, heads, dim]."""
    ahead = [None] * len(lens) if last_visible is None else torch.split(last_visible, list(q_lens))
    pieces = zip(torch.split(q, list(q_lens)), tables, lens, ahead, strict=True)
    outs = [_attended(piece, gathered(k_cache, t, n), gathered(v_cache, t, n), rule, a) for piece, t, n, a in pieces]
    return torch.cat(outs) if outs else q.new_empty((0, q.shape[1], v_cache.shape[3]))


def _decoded(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, max_context_len: int, rule: AttentionRule
) -> Tensor:  # fmt: skip
    lens = tuple(context_lens.tolist())
    assert max(lens, default=0) <= max_context_len
    return _each(q, k_cache, v_cache, block_tables, lens, (1,) * len(lens), rule)


def _prefilled(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: VarlenBatch, rule: AttentionRule) -> Tensor:
    tables, _, _, q_lens, lens, last_visible = batch
    return _each(q, k_cache, v_cache, tables, lens, q_lens, rule, last_visible)


def _kv_cost(arguments: Arguments) -> Cost:
    """Count the visible keys and values once each."""
    q, k_cache, window = arguments["q"], arguments["k_cache"], arguments["rule"].window
    lens = [n if window is None else min(n, window) for n in arguments["context_lens"].tolist()]
    token = 2 * k_cache.shape[2] * k_cache.shape[3]
    return Cost(2 * size(q) + sum(lens) * token * k_cache.element_size(), 4 * sum(lens) * q.shape[1] * q.shape[2])


def _pairs(q_lens: Lens, lens: Lens, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees."""
    return sum(
        sum(min(i, window) for i in range(n - m + 1, n + 1)) if window is not None else m * (n - m) + m * (m + 1) // 2
        for m, n in zip(q_lens, lens, strict=True)
    )


def _prefill_cost(arguments: Arguments) -> Cost:
    q, k_cache, batch = arguments["q"], arguments["k_cache"], arguments["batch"]
    pairs = _pairs(batch.host_q_lens, batch.host_context_lens, arguments["rule"].window)
    token = 2 * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    return Cost(2 * size(q) + sum(batch.host_context_lens) * token, 4 * pairs * q.shape[1] * q.shape[2])


def _fused(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    backend: SDPBackend | None = None,
) -> Tensor:
    """Run torch's own attention on one prompt with contiguous blocks, with `backend` or torch's choice."""
    assert len(batch.host_q_lens) == 1
    assert rule == AttentionRule(rule.scale)
    context = batch.host_context_lens[0]
    k, v = (cache.flatten(0, 1)[:context].transpose(0, 1)[None] for cache in (k_cache, v_cache))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, scale=rule.scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


_FUSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "SDPA": _fused,
    "SDPA flash": partial(_fused, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(_fused, backend=SDPBackend.CUDNN_ATTENTION),
}


_SCALE = 0.7  # of a cache in FP8; a power of two would not reveal that it is applied twice


def _scale(is_fp8: bool) -> Arguments:
    return {"cache_scale": torch.tensor([_SCALE]) if is_fp8 else None}


def _mla_write(
    tokens: int, latent: int, rotary: int, block_size: int, target: Target | None = None, fp8: bool = False
) -> Case:
    """Make a case that writes rows of a wider projection into one layer of an arena."""

    def make(dtype: torch.dtype) -> Arguments:
        num_blocks = -(-tokens // block_size) + 3
        angles = torch.rand(tokens, rotary // 2) * 6
        kind = FP8 if fp8 else dtype
        arena = empty_arena(num_blocks, 2, Heads(1, 1, latent + rotary, block_size), kind).zero_()
        return {
            "x": torch.randn(tokens, latent + rotary + 4).to(dtype)[:, : latent + rotary], "norm": torch.randn(latent).to(dtype), "eps": 1e-6,
            "cos": angles.cos(), "sin": angles.sin(), "cache": arena[:, 1, 0].squeeze(2),
            "slot_mapping": torch.randperm(num_blocks * block_size)[:tokens], **_scale(fp8),
        }  # fmt: skip

    return Case(f"{tokens} tokens of {latent} + {rotary}, blocks of {block_size}{', fp8' * fp8}", make, target)


def _mla_decode(
    heads: int,
    latent: int,
    rotary: int,
    lens: Lens,
    block_size: int,
    target: Target | None = None,
    fp8: bool = False,
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        kind = FP8 if fp8 else dtype
        cache = paged(lens, Heads(heads, 1, latent + rotary, block_size), kind, 1 if target else 2)
        return _latent_queries(heads, latent, rotary, len(lens), dtype) | {
            "cache": cache.k_cache.squeeze(2), "block_tables": cache.block_tables, "context_lens": cache.context_lens,
            "max_context_len": max(lens, default=0), "scale": (latent + rotary) ** -0.5, **_scale(fp8),
        }  # fmt: skip

    name = f"{heads} heads of {latent} + {rotary}, contexts {_short(lens)}, blocks of {block_size}{', fp8' * fp8}"
    return Case(name, make, target)


def _mla_prefill(
    heads: int,
    latent: int,
    rotary: int,
    q_lens: Lens,
    lens: Lens,
    block_size: int,
    target: Target | None = None,
    fp8: bool = False,
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        kind = FP8 if fp8 else dtype
        cache = paged(lens, Heads(heads, 1, latent + rotary, block_size), kind, 1 if target else 2)
        return _latent_queries(heads, latent, rotary, sum(q_lens), dtype) | {
            "cache": cache.k_cache.squeeze(2), "batch": varlen(cache.block_tables, q_lens, lens), "scale": (latent + rotary) ** -0.5,
            **_scale(fp8),
        }  # fmt: skip

    name = f"{heads} heads of {latent} + {rotary}, queries {_short(q_lens)}, contexts {_short(lens)}{', fp8' * fp8}"
    return Case(name, make, target)


def _short(lens: Lens) -> str:
    return str(lens) if len(lens) < 6 else f"{len(lens)} of {max(lens)}"


def _latent_queries(heads: int, latent: int, rotary: int, tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "q_latent": torch.randn(tokens, heads, latent).to(dtype),
        "q_rotary": torch.randn(tokens, heads, rotary).to(dtype),
    }


def _as_one_head(
    q_latent: Tensor, q_rotary: Tensor, cache: Tensor, cache_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    one = cache.unsqueeze(2) * (1.0 if cache_scale is None else cache_scale)
    return torch.cat((q_latent, q_rotary), dim=2), one, one[..., : q_latent.shape[2]]


def _mla_written(
    x: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    cache_scale: Tensor | None,
) -> None:
    latent, rotary = torch.split(x, [norm.shape[0], 2 * cos.shape[1]], dim=1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    pairs = torch.complex(rotary[:, 0::2], rotary[:, 1::2]) * torch.complex(cos, sin)
    rows = torch.cat((latent, pairs.real, pairs.imag), dim=1) / (1.0 if cache_scale is None else cache_scale)
    for slot, row in zip(slot_mapping.tolist(), rows, strict=True):
        cache[slot // cache.shape[1], slot % cache.shape[1]] = row


def _mla_write_cost(arguments: Arguments) -> Cost:
    x, rest = arguments["x"], [arguments[name] for name in ("norm", "cos", "sin", "slot_mapping")]
    return Cost(2 * size(x) + size(*rest))


def _mla_decoded(
    q_latent: Tensor, q_rotary: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, max_context_len: int, scale: float,
    cache_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    lens = tuple(context_lens.tolist())
    assert max(lens, default=0) <= max_context_len
    q, k, v = _as_one_head(q_latent, q_rotary, cache, cache_scale)
    return _each(q, k, v, block_tables, lens, (1,) * len(lens), AttentionRule(scale))


def _mla_prefilled(
    q_latent: Tensor, q_rotary: Tensor, cache: Tensor, batch: VarlenBatch, scale: float, cache_scale: Tensor | None
) -> Tensor:
    q, k, v = _as_one_head(q_latent, q_rotary, cache, cache_scale)
    return _each(q, k, v, batch.block_tables, batch.host_context_lens, batch.host_q_lens, AttentionRule(scale))


def _mla_cost(arguments: Arguments) -> Cost:
    q, cache = arguments["q_latent"], arguments["cache"]
    if "batch" in arguments:
        lens, q_lens = arguments["batch"].host_context_lens, arguments["batch"].host_q_lens
    else:
        lens = tuple(arguments["context_lens"].tolist())
        q_lens = (1,) * len(lens)
    flops = 2 * (cache.shape[2] + q.shape[2]) * q.shape[1] * _pairs(q_lens, lens, None)
    return Cost(2 * size(q) + size(arguments["q_rotary"]) + sum(lens) * cache.shape[2] * cache.element_size(), flops)


def _mla_selected(
    heads: int,
    latent: int,
    rotary: int,
    lens: Lens,
    top_k: int,
    block_size: int,
    *,
    queries: int | None = None,
    target: Target | None = None,
    fp8: bool = False,
) -> Case:
    """Make a case. `queries`: the last tokens of one context; None for the last token of each."""

    def make(dtype: torch.dtype) -> Arguments:
        cache = paged(lens, Heads(heads, 1, latent + rotary, block_size), FP8 if fp8 else dtype, 1 if target else 2)
        visible = cache.context_lens if queries is None else torch.arange(lens[0] - queries + 1, lens[0] + 1)
        positions = torch.zeros(len(visible), top_k, dtype=torch.int64)
        for row, seen in zip(positions, visible.tolist(), strict=True):
            chosen = torch.randperm(seen)[:top_k].sort().values
            row[: len(chosen)] = chosen
        return _latent_queries(heads, latent, rotary, len(visible), dtype) | {
            "cache": cache.k_cache.squeeze(2), "block_tables": cache.block_tables, "positions": positions,
            "num_read": visible.clamp(max=top_k), "scale": (latent + rotary) ** -0.5, **_scale(fp8),
        }  # fmt: skip

    asked = "" if queries is None else f", queries {queries}"
    name = f"{heads} heads of {latent} + {rotary}, {top_k} of contexts {_short(lens)}{asked}, blocks of {block_size}{', fp8' * fp8}"
    return Case(name, make, target)


def _mla_selected_formula(
    q_latent: Tensor, q_rotary: Tensor, cache: Tensor, block_tables: Tensor, positions: Tensor, num_read: Tensor, scale: float,
    cache_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    q, k, v = _as_one_head(q_latent, q_rotary, cache, cache_scale)
    outs = []
    for row, (query, own, read) in enumerate(zip(q, positions, num_read.tolist(), strict=True)):
        table, kept = block_tables[min(row, len(block_tables) - 1)], own[:read]
        places = table[kept // cache.shape[1]], kept % cache.shape[1]
        outs.append(_attended(query[None], k[places], v[places], AttentionRule(scale)))
    return torch.cat(outs)


def _mla_selected_cost(arguments: Arguments) -> Cost:
    q, cache, read = arguments["q_latent"], arguments["cache"], int(arguments["num_read"].sum())
    flops = 2 * (cache.shape[2] + q.shape[2]) * q.shape[1] * read
    return Cost(2 * size(q) + size(arguments["q_rotary"]) + read * cache.shape[2] * cache.element_size(), flops)


def _index_write(tokens: int, dim: int, block_size: int, fp8: bool = False, target: Target | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        num_blocks = -(-tokens // block_size) + 3
        arena = empty_arena(num_blocks, 2, Heads(1, 1, dim, block_size), FP8 if fp8 else dtype).zero_()
        return {
            "keys": torch.randn(tokens, dim + 2).to(dtype)[:, :dim], "cache": arena[:, 1, 0].squeeze(2),
            "scales": torch.zeros(num_blocks, 2, block_size)[:, 1] if fp8 else None,
            "slot_mapping": torch.randperm(num_blocks * block_size)[:tokens],
        }  # fmt: skip

    return Case(f"{tokens} tokens of {dim}, blocks of {block_size}{', fp8' * fp8}", make, target)


def _index_written(keys: Tensor, cache: Tensor, scales: Tensor | None, slot_mapping: Tensor) -> None:
    for slot, key in zip(slot_mapping.tolist(), keys, strict=True):
        place = slot // cache.shape[1], slot % cache.shape[1]
        scale = 1.0
        if scales is not None:
            scale = scales[place] = key.abs().max() / 448
        cache[place] = key / scale


def _index_scores(
    heads: int,
    dim: int,
    lens: Lens,
    block_size: int,
    *,
    queries: int | None = None,
    target: Target | None = None,
    fp8: bool = False,
    spare: int = 0,
) -> Case:
    """Make a case.

    `queries`: number of last tokens of one context; None for the last token of each. `spare`: by how much `longest` is too large.
    """

    def make(dtype: torch.dtype) -> Arguments:
        cache = paged(lens, Heads(heads, 1, dim, block_size), FP8 if fp8 else dtype, 1 if target else 2)
        tokens = len(lens) if queries is None else queries
        visible = cache.context_lens if queries is None else torch.arange(lens[0] - queries + 1, lens[0] + 1)
        return {
            "q": torch.randn(tokens, heads, dim).to(dtype), "weights": torch.randn(tokens, heads), "cache": cache.k_cache.squeeze(2),
            "scales": torch.rand(cache.k_cache.shape[:2]) + 0.5 if fp8 else None, "block_tables": cache.block_tables, "visible": visible,
            "longest": max(lens, default=0) + spare,
        }  # fmt: skip

    asked = "" if queries is None else f", queries {queries}"
    return Case(
        f"{heads} heads of {dim}, contexts {_short(lens)}{asked}, blocks of {block_size}{', fp8' * fp8}", make, target
    )


def _index_scored(
    q: Tensor, weights: Tensor, cache: Tensor, scales: Tensor | None, block_tables: Tensor, visible: Tensor, longest: int
) -> Tensor:  # fmt: skip
    out = q.new_zeros(len(q), longest)
    for row, (queries, shares, seen) in enumerate(zip(q, weights, visible.tolist(), strict=True)):
        table = block_tables[min(row, len(block_tables) - 1)]
        keys = gathered(cache, table, seen)
        if scales is not None:
            keys = keys * gathered(scales.unsqueeze(2), table, seen)
        out[row, :seen] = shares @ (queries @ keys.T).clamp(min=0)
    return out


def _index_cost(arguments: Arguments) -> Cost:
    q, cache, seen = arguments["q"], arguments["cache"], arguments["visible"]
    keys = int(seen.max() if len(arguments["block_tables"]) == 1 else seen.sum())
    read = keys * (cache.shape[2] * cache.element_size() + (0 if arguments["scales"] is None else 4))
    return Cost(
        size(q, arguments["weights"]) + read + 4 * int(seen.sum()), 2 * int(seen.sum()) * q.shape[1] * (q.shape[2] + 1)
    )


_LLAMA_8B, _GPT_OSS, _GEMMA_2 = Heads(32, 8, 128, 16), Heads(64, 8, 64, 16), Heads(16, 8, 256, 16)
_PLAIN, _ODD, _WIDE, _ALONE = Heads(4, 2, 16, 16), Heads(6, 2, 10, 5), Heads(16, 1, 24, 32), Heads(3, 3, 80, 3)
_BY_TOKEN = Heads(6, 2, 80, 16, by_token=True)
_TILED = Heads(4, 2, 64, 16)  # a width and a block size that the Hopper form of prefill supports

# Attention weights are rounded to the storage type before they are multiplied with the values, and the result is rounded once. In fp32 the absolute
# error of a score, which grows with its size (up to ten), becomes the relative error of its weight. Measured: five roundings at most; a GPU's exp2
# adds two.
_ROUNDINGS, _ARITHMETIC = 2.0, 8.0

DECODE_ATTENTION = Operation(
    name="decode_attention",
    function=decode_attention.decode_attention,
    reference=_decoded,
    roundings=_ROUNDINGS,
    arithmetic=_ARITHMETIC,
    cases=(
        _decode(_PLAIN, ()),
        _decode(_PLAIN, (1,)),
        _decode(_PLAIN, (16, 600, 1)),
        _decode(_ODD, (7, 301)),
        _decode(_WIDE, (33, 270), sinks=True),
        _decode(_ALONE, (50,)),
        _decode(_BY_TOKEN, (70, 1, 300)),
        _decode(_BY_TOKEN, (20, 90), window=33, sinks=True),
        _decode(_ODD, (70, 1, 300), window=1),
        _decode(_PLAIN, (300, 20, 2), window=21, sinks=True),
        _decode(_PLAIN, (30, 400), window=290),
        _decode(_ODD, (40,), window=10_000),
        _decode(_PLAIN, (300, 64, 65, 1), window=64, is_chunked=True),
        _decode(_ODD, (41, 301), window=20, is_chunked=True),
        _decode(_ODD, (40, 301), soft_cap=1.5, scale=1.0),
        _decode(_PLAIN, (90, 30), soft_cap=50.0, window=40, sinks=True),
        _decode(_PLAIN, (300, 17), fp8=True),
        _decode(_ODD, (1, 80), fp8=True, window=33, sinks=True, soft_cap=4.0),
    ),
    bench=(
        *(_decode(_LLAMA_8B, (8192,) * seqs, _READ, layers=1) for seqs in (1, 8, 64)),
        _decode(_LLAMA_8B, (131_072,), _READ, layers=1),
        _decode(_LLAMA_8B, (8192,) * 64, _READ, layers=1, fp8=True),
        _decode(_GPT_OSS, (8192,) * 32, _READ, layers=1, sinks=True),
        _decode(_GEMMA_2, (8192,) * 16, _READ, layers=1, soft_cap=50.0),
    ),
    cost=_kv_cost,
)
VERIFY_ATTENTION = Operation(
    name="verify_attention",
    function=verify_attention.verify_attention,
    reference=_prefilled,
    roundings=_ROUNDINGS,
    arithmetic=_ARITHMETIC,
    cases=(
        _verify(_PLAIN, (), 3),
        _verify(_PLAIN, (300, 9, 20, 33), 4, 1, 3, 8),
        _verify(_ODD, (40, 301), 1, 7, window=33),
        _verify(_PLAIN, (5,), 5),
        _verify(_PLAIN, (300, 9, 20), 4),
        _verify(_ODD, (40, 6), 6, window=5, sinks=True),
        _verify(_ODD, (42, 6, 300), 4, window=20, is_chunked=True),
        _verify(_WIDE, (70, 31), 5),  # 80 rows: two tiles
        _verify(_ODD, (300, 40), 3, window=270),
        _verify(_BY_TOKEN, (70, 8), 4),
        _verify(_ALONE, (20,), 2, soft_cap=2.0),
        _verify(_PLAIN, (33, 90), 4, fp8=True),
    ),
    bench=(
        _verify(_LLAMA_8B, (8192,) * 8, 4, target=_READ),
        _verify(_LLAMA_8B, (8192,) * 64, 4, target=_READ),
        _verify(_LLAMA_8B, (8192,) * 8, 8, target=_READ),
    ),
    cost=_prefill_cost,
)
PREFILL_ATTENTION = Operation(
    name="prefill_attention",
    function=prefill_attention.prefill_attention,
    reference=_prefilled,
    roundings=_ROUNDINGS,
    arithmetic=_ARITHMETIC,
    cases=(
        _prefill(_PLAIN, (), ()),
        _prefill(_PLAIN, (3,), (3,)),
        _prefill(_PLAIN, (40, 1, 2), (90, 20, 2)),
        _prefill(_ODD, (130, 17), (301, 17)),
        _prefill(_WIDE, (20,), (70,), sinks=True),
        _prefill(_ALONE, (70, 3), (70, 40)),
        _prefill(_BY_TOKEN, (70, 3), (90, 40)),
        _prefill(_BY_TOKEN, (40,), (99,), window=33),
        _prefill(_ODD, (9, 1), (40, 20), window=1),
        _prefill(_PLAIN, (70, 30), (200, 30), window=21, sinks=True),
        _prefill(_PLAIN, (150,), (420,), window=200),
        _prefill(_PLAIN, (60,), (300,), window=10_000),
        _prefill(_PLAIN, (70, 30, 1), (200, 30, 65), window=64, is_chunked=True),
        _prefill(_ODD, (150,), (420,), window=33, is_chunked=True),
        _prefill(_ODD, (40, 5), (40, 60), soft_cap=1.5, scale=1.0),
        _prefill(_PLAIN, (20, 3), (33, 60), fp8=True),
        _prefill(_ODD, (70,), (99,), fp8=True, window=33, sinks=True, soft_cap=4.0),
        _prefill(_TILED, (130, 3, 300, 70), (301, 3, 300, 129)),
        _prefill(_TILED, (200, 65), (500, 400), window=150, sinks=True),
        _prefill(_TILED, (200, 70), (500, 70), window=70, is_chunked=True),
        # An image in one tile of rows, over several, across the beginning of a chunk, and to its end.
        _prefill(_PLAIN, (70, 30, 1), (200, 30, 20), images=((0, 135, 150), (1, 3, 30))),
        _prefill(_PLAIN, (150, 9), (420, 40), window=21, images=((0, 260, 300), (0, 301, 400), (1, 33, 38))),
        _prefill(_ODD, (130, 17), (301, 17), images=((0, 180, 300), (1, 0, 17)), sinks=True),
        _prefill(_ODD, (40, 50), (40, 99), images=((0, 2, 38), (1, 60, 70)), soft_cap=1.5, scale=1.0),
        _prefill(_ODD, (70,), (99,), images=((0, 40, 90),), fp8=True, window=33),
        _prefill(_TILED, (200, 70), (500, 70), images=((0, 310, 450), (1, 64, 66))),
    ),
    bench=(
        _prefill(_LLAMA_8B, (4096,), (4096,), _FUSED, layers=1, in_order=True),
        _prefill(_LLAMA_8B, (16_384,), (16_384,), _FUSED, layers=1, in_order=True),
    ),
    cost=_prefill_cost,
    rivals=_FUSED_FORMS,
)
# Tolerance: in the storage type, the rounding of the result; in fp32, those of norm and rotation.
MLA_WRITE = Operation(
    name="mla_write",
    function=mla.mla_write,
    reference=_mla_written,
    roundings=1,
    arithmetic=4,
    cases=(
        _mla_write(0, 32, 16, 16),
        _mla_write(1, 24, 6, 5),
        _mla_write(19, 32, 16, 16),
        _mla_write(7, 500, 10, 3),
        _mla_write(3, 512, 64, 16),
        _mla_write(19, 24, 6, 5, fp8=True),
    ),
    bench=(_mla_write(64, 512, 64, 16, _COPY), _mla_write(4096, 512, 64, 16, _COPY)),
    cost=_mla_write_cost,
    changes=("cache",),
)
MLA_DECODE = Operation(
    name="mla_decode",
    function=mla.mla_decode,
    reference=_mla_decoded,
    roundings=_ROUNDINGS,
    arithmetic=_ARITHMETIC,
    cases=(
        _mla_decode(4, 32, 16, (), 16),
        _mla_decode(4, 32, 16, (1,), 16),
        _mla_decode(16, 32, 16, (300, 16, 90), 16),
        _mla_decode(5, 24, 6, (40, 301), 5),
        _mla_decode(70, 16, 8, (33, 7), 3),  # two tiles of heads, the second nearly empty
        _mla_decode(16, 64, 64, (300, 16, 90), 16),  # widths and a block size that the Hopper form supports
        _mla_decode(100, 128, 64, (1, 700), 32),
        _mla_decode(5, 24, 6, (40, 301), 5, fp8=True),
        _mla_decode(16, 64, 64, (300, 16), 16, fp8=True),
    ),
    bench=(
        # 242 operations per byte: close to the limits of both memory and compute
        _mla_decode(128, 512, 64, (8192,) * 64, 16, Target(0.5, "matmul")),
        _mla_decode(16, 512, 64, (8192,) * 64, 16, _READ),
        _mla_decode(16, 512, 64, (8192,) * 64, 16, _READ, fp8=True),
    ),
    cost=_mla_cost,
)
MLA_PREFILL = Operation(
    name="mla_prefill",
    function=mla.mla_prefill,
    reference=_mla_prefilled,
    roundings=_ROUNDINGS,
    arithmetic=_ARITHMETIC,
    cases=(
        _mla_prefill(4, 32, 16, (), (), 16),
        _mla_prefill(4, 32, 16, (3, 20, 1), (3, 70, 33), 16),
        _mla_prefill(5, 24, 6, (40, 9), (90, 9), 5),
        _mla_prefill(70, 16, 8, (3,), (50,), 3),
        _mla_prefill(5, 64, 64, (30, 1, 80), (300, 17, 80), 16),
        _mla_prefill(4, 24, 6, (3, 20), (70, 33), 5, fp8=True),
    ),
    bench=(_mla_prefill(16, 512, 64, (4096,), (4096,), 16, Target(0.4, "matmul")),),
    cost=_mla_cost,
)
MLA_SELECTED = Operation(
    name="mla_selected",
    function=mla.mla_selected,
    reference=_mla_selected_formula,
    roundings=_ROUNDINGS + 1,  # a copy of an FP8 vector is rounded after its scale is applied
    arithmetic=_ARITHMETIC,
    cases=(
        _mla_selected(4, 32, 16, (1,), 16, 16),
        _mla_selected(5, 24, 6, (40, 301, 3), 13, 5),
        _mla_selected(16, 64, 64, (300, 16), 64, 16),
        _mla_selected(6, 32, 16, (90,), 32, 16, queries=40),
        _mla_selected(5, 24, 6, (40, 301), 13, 5, fp8=True),
    ),
    bench=(
        _mla_selected(128, 512, 64, (32_768,) * 64, 2048, 16, target=Target(0.4, "matmul")),
        _mla_selected(128, 512, 64, (32_768,), 2048, 16, queries=56, target=Target(0.4, "matmul")),
    ),
    cost=_mla_selected_cost,
)
INDEX_WRITE = Operation(
    name="index_write",
    function=key_index.index_write,
    reference=_index_written,
    roundings=0,
    arithmetic=4,
    cases=(_index_write(0, 16, 16), _index_write(1, 14, 5), _index_write(19, 128, 16)),
    bench=(_index_write(64, 128, 16, target=_COPY), _index_write(4096, 128, 16, target=_COPY)),
    cost=lambda arguments: Cost(2 * size(arguments["keys"]) + size(arguments["slot_mapping"])),
    changes=("cache",),
)
INDEX_WRITE_FP8 = replace(
    INDEX_WRITE,
    name="index_write_fp8",
    cases=(_index_write(0, 16, 16, fp8=True), _index_write(7, 14, 5, fp8=True), _index_write(19, 128, 16, fp8=True)),
    bench=(_index_write(64, 128, 16, fp8=True, target=_COPY), _index_write(4096, 128, 16, fp8=True, target=_COPY)),
    changes=("cache", "scales"),
)
# Keys and queries are multiplied as they are stored, and everything else is computed in fp32.
INDEX_SCORES = Operation(
    name="index_scores",
    function=key_index.index_scores,
    reference=_index_scored,
    roundings=0,
    arithmetic=_ARITHMETIC,
    cases=(
        _index_scores(4, 16, (1,), 16),
        _index_scores(9, 14, (40, 301), 5),
        _index_scores(4, 16, (300, 16, 90), 16, spare=4),
        _index_scores(12, 32, (700,), 16, queries=20),
        _index_scores(64, 128, (33, 70), 16),
        _index_scores(9, 14, (40, 301), 5, fp8=True),
        _index_scores(4, 32, (90,), 16, queries=33, fp8=True),
    ),
    bench=(
        _index_scores(64, 128, (32_768,) * 16, 16, target=_READ),
        _index_scores(64, 128, (32_768,) * 16, 16, target=_READ, fp8=True),
        _index_scores(64, 128, (32_768,), 16, queries=2048, target=Target(0.4, "matmul")),
    ),
    cost=_index_cost,
)
OPERATIONS = (
    DECODE_ATTENTION,
    VERIFY_ATTENTION,
    PREFILL_ATTENTION,
    MLA_WRITE,
    MLA_DECODE,
    MLA_PREFILL,
    MLA_SELECTED,
    INDEX_WRITE,
    INDEX_WRITE_FP8,
    INDEX_SCORES,
)
