"""An FP8 cache as it is written and read: what is stored is the nearest number that FP8 has, and what is read is exactly that."""

import pytest
import torch

from kernels.attention_rule import AttentionRule
from kernels.decode_attention import decode_attention
from kernels.fp8_cache import FP8, quantize
from kernels.kv_write import kv_write
from kernels.prefill_attention import prefill_attention
from kernels.qkv import rotate_and_cache
from tests.closeness import assert_close
from tests.kernels.test_paged_attention import Paged, attention, varlen

SCALES = (0.03, 0.5)


def cached(paged: Paged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same sequences' caches in FP8, and their scales."""
    scales = torch.tensor(SCALES)
    block_size, (_, kv_heads, head_dim) = paged.k_cache.shape[1], paged.k[0].shape
    arena = torch.zeros(len(paged.k_cache), 2, 2, block_size, kv_heads, head_dim, dtype=FP8)
    k_cache, v_cache = arena[:, 1, 0], arena[:, 1, 1]
    for table, k, v in zip(paged.block_tables, paged.k, paged.v, strict=True):
        positions = torch.arange(len(k))
        slots = table[positions // block_size] * block_size + positions % block_size
        kv_write(k, v, k_cache, v_cache, slots, scales)
    assert not bool(arena[:, 0].float().any()), "the other layer must stay untouched"
    return k_cache, v_cache, scales


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return quantize(x, torch.tensor(scale)).double() * scale


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_attention_over_fp8_is_attention_over_what_fp8_keeps(soft_cap: float | None) -> None:
    lens, q_lens = [23, 70], [4, 9]
    paged = Paged(lens, 2, 16, 5)
    k_cache, v_cache, scales = cached(paged)
    k, v = (
        [rounded(part, scale) for part in parts]
        for parts, scale in ((paged.k, float(scales[0])), (paged.v, float(scales[1])))
    )
    q = torch.randn(2, 6, 16)
    rule = AttentionRule(0.3, soft_cap=soft_cap, kv_scales=scales)
    decoded = decode_attention(q, k_cache, v_cache, paged.block_tables, torch.tensor(lens), 70, rule)
    rows = torch.randn(sum(q_lens), 6, 16)
    batch = varlen(paged.block_tables, q_lens, lens)
    prefilled = prefill_attention(rows, k_cache, v_cache, batch, rule)
    for i, piece in enumerate(torch.split(rows, q_lens)):
        assert_close("decoded", capped(q[i : i + 1], k[i], v[i], soft_cap), decoded[i : i + 1], 1e-5)
        assert_close("prefilled", capped(piece, k[i], v[i], soft_cap), torch.split(prefilled, q_lens)[i], 1e-5)


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    if soft_cap is None:
        return attention(q, k, v, 0.3)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = soft_cap * (torch.einsum("qhd,khd->hqk", q.double(), k) * 0.3 / soft_cap).tanh()
    unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_stored_as_the_nearest_and_the_largest_where_they_are_larger(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 4, 8).to(dtype) * 10
    qkv[0, 3, 0] = torch.nan
    arena = torch.zeros(5, 2, 2, 4, 1, 8, dtype=FP8)
    slots = torch.randperm(20)[:6]
    angles = torch.zeros(6, 4)
    scales = torch.tensor(SCALES)
    values = qkv[:, 3].clone()
    rotate_and_cache(qkv, None, 0.0, angles.cos(), angles.sin(), arena[:, 1, 0], arena[:, 1, 1], slots, scales)
    stored = arena[:, 1, 1].float()[slots // 4, slots % 4, 0]
    expected = (values.float() / scales[1]).clamp(-448, 448).to(FP8).float()
    assert torch.equal(stored.isnan(), expected.isnan())
    assert torch.equal(stored.nan_to_num(), expected.nan_to_num())
    assert bool((arena[:, 1, 0].float().abs() == 448).any()), (
        "keys of 13 and more are beyond what fits under their scale"
    )


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_cap_far_above_every_score_changes_nothing(tokens: int) -> None:
    paged = Paged([60], 2, 16, 5)
    q = torch.randn(tokens, 4, 16)
    batch = varlen(paged.block_tables, [tokens], [60])
    plain, loose, tight = (
        prefill_attention(q, paged.k_cache, paged.v_cache, batch, AttentionRule(0.3, soft_cap=cap))
        for cap in (None, 1e4, 0.1)
    )
    assert_close("capped", plain, loose, 1e-5)
    assert float((tight - plain).abs().max()) > 0.01
