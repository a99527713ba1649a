"""Paged attention equals plain attention over each sequence's keys and values: cases that are not in the catalogue."""

import pytest
import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import attend_by_torch, decode_attention
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.elementwise.kv_write import kv_write
from tests.closeness import assert_close

# Windows of one token, of fewer and of more tokens than a block, and of more than any context; sinks alone and with a window.
VARIANTS = [(None, False), (1, False), (6, False), (17, False), (1000, False), (None, True), (6, True)]


class Paged:
    """Sequences of given lengths in scattered blocks of a cache, written by kv_write, with their plain keys and values."""

    def __init__(self, lens: list[int], kv_heads: int, head_dim: int, block_size: int) -> None:
        blocks_of = [-(-n // block_size) for n in lens]
        num_blocks = sum(blocks_of) + 3
        # two layers, so that views of one are strided
        arena = torch.zeros(num_blocks, 2, 2, block_size, kv_heads, head_dim)
        self.k_cache, self.v_cache = arena[:, 1, 0], arena[:, 1, 1]
        order = torch.randperm(num_blocks)
        tables = [t.tolist() for t in torch.split(order[: sum(blocks_of)], blocks_of)]
        self.block_tables = torch.tensor([t + [t[0]] * (max(blocks_of) - len(t)) for t in tables])
        self.k = [torch.randn(n, kv_heads, head_dim) for n in lens]
        self.v = [torch.randn(n, kv_heads, head_dim) for n in lens]
        for table, k, v in zip(tables, self.k, self.v, strict=True):
            positions = torch.arange(len(k))
            slots = torch.tensor(table)[positions // block_size] * block_size + positions % block_size
            kv_write(k, v, self.k_cache, self.v_cache, slots)
        assert bool((arena[:, 0] == 0).all()), "the other layer must stay untouched"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from q [tokens, heads, head_dim], the last tokens of the context k, v [context, kv_heads, head_dim]."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    position = torch.arange(len(k) - len(q), len(k))
    scores.masked_fill_(torch.arange(len(k)) > position.unsqueeze(1), -torch.inf)
    if window is not None:
        scores.masked_fill_(torch.arange(len(k)) <= position.unsqueeze(1) - window, -torch.inf)
    if sinks is not None:  # each head has one more key, with a score and no value
        column = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def varlen(block_tables: torch.Tensor, q_lens: list[int], lens: list[int]) -> VarlenBatch:
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    return VarlenBatch(block_tables, starts, torch.tensor(lens).int(), tuple(q_lens), tuple(lens))


@pytest.mark.parametrize(("window", "has_sinks"), VARIANTS)
def test_decodes_that_are_gathered_one_by_one_attend_to_their_own_contexts(window: int | None, has_sinks: bool) -> None:
    lens, heads = [16, 1, 42, 7], 6
    paged = Paged(lens, 2, 10, 5)
    q = torch.randn(len(lens), heads, 10)
    sinks = torch.randn(heads) if has_sinks else None
    rule = AttentionRule(0.3, window, sinks)
    caches = paged.k_cache, paged.v_cache, paged.block_tables
    actual = attend_by_torch(q[:, None], *caches, torch.tensor(lens), max(lens), rule, gathered_bytes=1)[:, 0]
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        assert_close(f"sequence {i}", attention(q[i : i + 1], k, v, 0.3, window, sinks), actual[i : i + 1], 1e-5)


@pytest.mark.parametrize(("window", "has_sinks"), VARIANTS)
def test_prompts_of_several_tiles_attend_to_the_prefix_and_causally_to_the_chunk(
    window: int | None, has_sinks: bool
) -> None:
    q_lens, lens, heads = [5, 1, 517, 260], [5, 1, 531, 300], 6  # a tile has 256 queries
    paged = Paged(lens, 2, 10, 5)
    q = torch.randn(sum(q_lens), heads, 10)
    sinks = torch.randn(heads) if has_sinks else None
    batch = varlen(paged.block_tables, q_lens, lens)
    actual = prefill_attention(q, paged.k_cache, paged.v_cache, batch, AttentionRule(0.3, window, sinks))
    pieces = zip(torch.split(q, q_lens), torch.split(actual, q_lens), paged.k, paged.v, strict=True)
    for i, (q_piece, out, k, v) in enumerate(pieces):
        assert_close(f"sequence {i}", attention(q_piece, k, v, 0.3, window, sinks), out, 1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_lies_before_a_window_is_never_read(has_sinks: bool) -> None:
    paged = Paged([40, 37], 2, 8, 5)
    for table, length in zip(paged.block_tables, (40, 37), strict=True):
        unseen = table[: (length - 7) // 5]  # the blocks that lie entirely before the last seven tokens
        paged.k_cache[unseen] = torch.nan
        paged.v_cache[unseen] = torch.nan
    q, lens, sinks = torch.randn(2, 4, 8), torch.tensor([40, 37]), torch.randn(4) if has_sinks else None
    rule = AttentionRule(0.3, 7, sinks)
    decoded = decode_attention(q, paged.k_cache, paged.v_cache, paged.block_tables, lens, 40, rule)
    batch = varlen(paged.block_tables, [1, 1], [40, 37])
    prefilled = prefill_attention(q, paged.k_cache, paged.v_cache, batch, rule)
    assert bool(decoded.isfinite().all())
    assert_close("the same token", decoded, prefilled, 1e-5)


# Weights and results are rounded to bf16 (eight bits: by at most 2^-9), and with sinks torch also rounds scores, which are up to about 8. An error of
# a score is a relative error of its weight.
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-5), (torch.bfloat16, 4 * 2.0**-9)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 3, 80), (5, 1, 40), (2, 1, 256)])
@pytest.mark.parametrize(("window", "has_sinks"), VARIANTS)
def test_prompts_of_many_tiles(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    ratio: float,
    window: int | None,
    has_sinks: bool,
) -> None:
    q_lens, lens = [130, 77], [130, 300]
    paged = Paged(lens, kv_heads, head_dim, 16)
    q = torch.randn(sum(q_lens), heads, head_dim).to(dtype)
    sinks = torch.randn(heads).to(dtype) if has_sinks else None
    caches = paged.k_cache.to(dtype), paged.v_cache.to(dtype)
    scale = 1.6 * head_dim**-0.5
    batch = varlen(paged.block_tables, q_lens, lens)
    actual = prefill_attention(q, *caches, batch, AttentionRule(scale, window, sinks))
    assert actual.dtype == dtype
    pieces = zip(torch.split(q, q_lens), torch.split(actual, q_lens), paged.k, paged.v, strict=True)
    for i, (q_piece, out, k, v) in enumerate(pieces):
        q_exact, k_exact, v_exact = (part.to(dtype).double() for part in (q_piece, k, v))
        expected = attention(q_exact, k_exact, v_exact, scale, window, None if sinks is None else sinks.double())
        assert_close(f"sequence {i}", expected, out, ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_cut_anywhere_has_the_same_bits(dtype: torch.dtype, window: int | None, arithmetic: str) -> None:
    if arithmetic != "C library":
        pytest.skip("torch does not guarantee equal bits")
    paged = Paged([210], 2, 64, 16)
    q = torch.randn(210, 6, 64).to(dtype)
    caches = paged.k_cache.to(dtype), paged.v_cache.to(dtype)

    def attend(first: int, end: int) -> torch.Tensor:
        batch = varlen(paged.block_tables, [end - first], [end])
        return prefill_attention(q[first:end], *caches, batch, AttentionRule(0.2, window))

    whole = attend(0, 210)
    assert torch.equal(torch.cat([attend(0, 1), attend(1, 67), attend(67, 210)]), whole)
