"""Latent attention in absorbed form equals ordinary attention over keys and values projected up from the latent vectors."""

import pytest
import torch

from load_tests.catalogue.paged_cases import Heads, gathered, paged, varlen
from pilotlight.kernels.attention.mla import mla_decode, mla_prefill
from tests.closeness import assert_close

HEADS, LATENT, ROTARY, NOPE, VALUE = 5, 24, 8, 16, 12


@pytest.mark.parametrize(("q_lens", "lens"), [((9,), (9,)), ((4, 1, 7), (40, 1, 18))])
def test_projecting_queries_down_is_projecting_keys_and_values_up(
    q_lens: tuple[int, ...], lens: tuple[int, ...]
) -> None:
    """Compare with DeepSeek-V2's formulas before absorption: a key is (W_uk c, k_rotary), a value is W_uv c."""
    cache, _, tables, _ = paged(lens, Heads(HEADS, 1, LATENT + ROTARY, 4), torch.float32)
    cache = cache.squeeze(2)
    up_keys, up_values = torch.randn(HEADS, NOPE, LATENT), torch.randn(HEADS, VALUE, LATENT)
    q_nope, q_rotary = torch.randn(sum(q_lens), HEADS, NOPE), torch.randn(sum(q_lens), HEADS, ROTARY)
    q_latent = torch.einsum("thn,hnl->thl", q_nope, up_keys)
    out = mla_prefill(q_latent, q_rotary, cache, varlen(tables, q_lens, lens), 0.1)
    values = torch.einsum("thl,hvl->thv", out, up_values)
    for piece_nope, piece_rotary, got, table, length in zip(
        *(torch.split(x, list(q_lens)) for x in (q_nope, q_rotary, values)), tables, lens, strict=True
    ):
        latent, k_rotary = gathered(cache, table, length).double().split((LATENT, ROTARY), dim=1)
        k = torch.einsum("cl,hnl->chn", latent, up_keys.double())
        v = torch.einsum("cl,hvl->chv", latent, up_values.double())
        scores = torch.einsum("thn,chn->htc", piece_nope.double(), k)
        scores = 0.1 * (scores + torch.einsum("thr,cr->htc", piece_rotary.double(), k_rotary))
        tokens = len(piece_nope)
        unseen = torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens + 1)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        assert_close("values", torch.einsum("htc,chv->thv", weights, v), got, 1e-5)


@pytest.mark.long
def test_a_needle_is_found_in_256k_tokens_and_nothing_after_the_query() -> None:
    """One key outweighs all others for each query, at any position. The block after the last token has an even larger key."""
    length, block = (1 << 18) - 5, 16
    heads = Heads(HEADS, 1, LATENT + ROTARY, block)
    cache, _, tables, _ = paged((length,), heads, torch.float32, layers=1)
    cache = cache.squeeze(2)
    q_latent, q_rotary = torch.randn(4, HEADS, LATENT), torch.zeros(4, HEADS, ROTARY)
    for query, at in enumerate((0, 131_071, length - 4, length - 1)):
        needle = q_latent[query].mean(0) / q_latent[query].mean(0).norm()
        q_latent[query] = needle
        cache[tables[0, at // block], at % block, :LATENT] = 100 * needle
    batch = varlen(tables, (4,), (length,))
    found = mla_prefill(q_latent, q_rotary, cache, batch, 1.0)
    # the third key is not after its query either, so the query sees it
    assert_close("prompt", 100 * q_latent[:3], found[:3], 1e-5)
    lens = torch.tensor([length])
    decoded = mla_decode(q_latent[3:], q_rotary[3:], cache, tables, lens, length, 1.0)
    assert_close("decoded", 100 * q_latent[3:], decoded, 1e-5)
