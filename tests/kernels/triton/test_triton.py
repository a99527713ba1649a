"""Every Triton kernel against its plain form in fp64: odd shapes, strides, poisoned outputs.

Without a GPU in fp32 and fp16 alone: the interpreter of Triton 3.6 to 3.9 holds bf16 as bit patterns and computes
wrongly with them, without an exception. A GPU adds bf16. Tolerances are the storage type's unit roundoff times a few
roundings; fp32's dot products under `ieee` precision add terms in another order, which costs the square root of their
number.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import kernels.activation as plain_activation
import kernels.norm as plain_norm
from kernels.triton import activation, norm
from kernels.triton.decode_attention import decode_attention
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.qkv import rotate_and_cache
from kernels.varlen import VarlenBatch
from tests.closeness import assert_close
from tests.kernels.test_paged_attention import Paged, attention

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN; what tests draw is the same in every run."""
    torch.manual_seed(11)
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 8), (1, 1), (3, 64), (5, 431)])
def test_norms(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    wide = torch.randn(tokens, hidden + 3).to(dtype)
    x, residual, weight = wide[:, :hidden], torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)
    assert_normed(x, weight, norm.rms_norm(x, weight, 1e-5), dtype)
    normalised, summed = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    assert_normed(x + residual, weight, normalised, dtype)


def assert_normed(x: torch.Tensor, weight: torch.Tensor, actual: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    if x.numel():
        exact = plain_norm.rms_norm(x.double(), weight.double(), 1e-5)
        assert_close("norm", exact, actual, 3 * ROUNDOFF[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_of_a_strided_projection(dtype: torch.dtype) -> None:
    projected, weight = torch.randn(4, 5, 10).to(dtype), torch.randn(3, 10).to(dtype)
    actual = norm.head_rms_norm(projected[:, :3], weight, 1e-6)
    exact = plain_norm.head_rms_norm(projected[:, :3].double(), weight.double(), 1e-6)
    assert_close("head norm", exact, actual, 6 * ROUNDOFF[dtype])  # the plain form computes in fp32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), [(0, 4), (1, 1), (3, 1025), (7, 44)])
@pytest.mark.parametrize(
    ("name", "more"), [("silu_and_mul", ()), ("gelu_tanh_and_mul", ()), ("clamped_swiglu", (1.702, 0.9))]
)
def test_gated_activations(name: str, more: tuple[float, ...], tokens: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 2 * columns).to(dtype)
    actual = getattr(activation, name)(x, *more)
    exact = getattr(plain_activation, name)(x.double(), *more)
    assert actual.dtype == dtype
    if tokens:
        assert_close(name, exact, actual, 12 * ROUNDOFF[dtype])  # up + 1 cancels where up is near -1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 16, 16), (5, 1, 10, 3)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normalised_turned_and_cached(
    heads: int, kv_heads: int, head_dim: int, block_size: int, has_norm: bool, dtype: torch.dtype
) -> None:
    tokens, all_heads = 6, heads + 2 * kv_heads
    qkv = (
        torch.randn(tokens, all_heads * head_dim + 5)
        .to(dtype)[:, : all_heads * head_dim]
        .view(tokens, all_heads, head_dim)
    )
    angle = torch.rand(tokens, head_dim // 2) * 6
    weight = torch.randn(heads + kv_heads, head_dim).to(dtype) if has_norm else None
    arena = torch.zeros(9, 2, 2, block_size, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(9 * block_size)[:tokens]
    caches = arena[:, 1, 0], arena[:, 1, 1]
    queries = rotate_and_cache(qkv, weight, 1e-6, angle.cos(), angle.sin(), *caches, slots)

    exact = qkv[:, : heads + kv_heads].double()
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    first, second = exact.chunk(2, -1)
    cos, sin = angle.double().cos().unsqueeze(1), angle.double().sin().unsqueeze(1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    blocks, offsets = slots // block_size, slots % block_size
    assert_close("queries", exact[:, :heads], queries, 6 * ROUNDOFF[dtype])
    assert_close("keys", exact[:, heads:], caches[0][blocks, offsets], 6 * ROUNDOFF[dtype])
    assert torch.equal(caches[1][blocks, offsets], qkv[:, heads + kv_heads :])
    untouched = torch.ones(9, block_size, dtype=torch.bool)
    untouched[blocks, offsets] = False
    assert bool((arena[:, 1].transpose(1, 2)[untouched] == 0).all()), "only the slots that were named are written"
    assert bool((arena[:, 0] == 0).all()), "the other layer must stay untouched"


ATTENTION: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 21},
    {"window": 10_000},
    {"sinks": True},
    {"window": 21, "sinks": True},
]
SHAPES = [(4, 2, 16, 16), (6, 2, 10, 5), (3, 1, 24, 4)]  # heads, kv heads, head_dim, block_size


def as_dtype(paged: Paged, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches, and what the sequences hold, rounded alike; padded blocks and blocks of nobody hold NaN."""
    both = torch.stack((paged.k_cache, paged.v_cache), dim=1).to(dtype)
    used = torch.zeros(both.shape[0] * both.shape[2], dtype=torch.bool)
    block_size = both.shape[2]
    for table, k in zip(paged.block_tables, paged.k, strict=True):
        positions = torch.arange(len(k))
        used[table[positions // block_size] * block_size + positions % block_size] = True
    poisoned = both.transpose(1, 2).flatten(0, 1).clone()
    poisoned[~used] = torch.nan
    both = poisoned.view(both.shape[0], block_size, 2, *both.shape[3:]).transpose(1, 2)
    paged.k, paged.v = [k.to(dtype) for k in paged.k], [v.to(dtype) for v in paged.v]
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("lens", [[1], [70, 1, 300]])
@pytest.mark.parametrize("kind", ATTENTION, ids=str)
def test_decode_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, lens: list[int], kind: dict[str, Any], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kernels.triton.decode_attention._LEAST_SPLIT", 128)  # several splits of short contexts
    paged = Paged(lens, kv_heads, head_dim, block_size)
    k_cache, v_cache = as_dtype(paged, dtype)
    q = torch.randn(len(lens), heads, head_dim).to(dtype)
    sinks = torch.randn(heads) if kind.get("sinks") else None
    actual = decode_attention(
        q, k_cache, v_cache, paged.block_tables, torch.tensor(lens), max(lens), 0.3, kind.get("window"), sinks
    )
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        expected = attention(q[i : i + 1], k, v, 0.3, kind.get("window"), sinks)
        assert_close(f"sequence {i}", expected[0], actual[i], 8 * ROUNDOFF[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize(("q_lens", "lens"), [([3], [3]), ([40, 1, 2], [90, 20, 2])])
@pytest.mark.parametrize("kind", ATTENTION, ids=str)
def test_prefill_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, q_lens: list[int], lens: list[int], kind: dict[str, Any],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    paged = Paged(lens, kv_heads, head_dim, block_size)
    k_cache, v_cache = as_dtype(paged, dtype)
    q = torch.randn(sum(q_lens), heads, head_dim).to(dtype)
    sinks = torch.randn(heads) if kind.get("sinks") else None
    batch = VarlenBatch(
        paged.block_tables, torch.tensor([0, *q_lens]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32),
        tuple(q_lens), tuple(lens),
    )  # fmt: skip
    actual = prefill_attention(q, k_cache, v_cache, batch, 0.3, kind.get("window"), sinks)
    pieces = zip(torch.split(q, q_lens), torch.split(actual, q_lens), paged.k, paged.v, strict=True)
    for i, (queries, got, k, v) in enumerate(pieces):
        expected = attention(queries, k, v, 0.3, kind.get("window"), sinks)
        assert_close(f"sequence {i}", expected, got, 8 * ROUNDOFF[dtype])
