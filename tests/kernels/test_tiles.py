"""Products and attention by matrix tiles, also on a system that refuses them.

If the processor has no tiles, they are computed in plain C; the code around them is the same.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.cpu import build
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.crossover import UNLIMITED
from pilotlight.kernels.elementwise.activation import gelu_tanh_and_mul, silu_and_mul
from pilotlight.kernels.matrices.linear import gated_linear, linear, logits
from pilotlight.kernels.matrices.lossless import pack_lossless
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.closeness import assert_close
from tests.cpu_kernels import computing_with

BF16 = torch.bfloat16
# Sizes of whole tiles and of parts of tiles; more columns than a chain; more rows than a unit sums at a time.
SIZES = [(64, 128), (42, 123), (33, 2148), (431, 6), (1, 1031), (130, 1024)]
ROWS = [5, 16, 17, 33, 64, 131, 530]
pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(600)]  # the first test compiles the library


@pytest.fixture(scope="module", params=["in plain C", "refused", "of the processor"])
def tiles(process_tier: None, request: pytest.FixtureRequest) -> Iterator[Library]:
    """Return the library with tiles, set to compute all products."""
    kind = "" if request.param == "of the processor" else "amx"
    if not kind and "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no tiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.SWITCH, kind)
        try:
            found = Library(build.LibraryBuild().build())
        except build.BuildError as error:
            pytest.skip(str(error))
    assert BF16 in found.slow, "with tiles, the products that oneDNN computes are measured"
    found.most_rows[BF16] = UNLIMITED
    has_tiles = ctypes.c_int.in_dll(ctypes.CDLL(str(found.path)), "has_tiles")
    assert has_tiles.value == 1
    has_tiles.value = request.param != "refused"
    yield found
    has_tiles.value = 1


@pytest.fixture(autouse=True)
def arithmetic(tiles: Library) -> Iterator[str]:
    with computing_with(tiles):
        yield "tiles"


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_is_what_it_is_in_fp64(outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(BF16), torch.randn(outputs).to(BF16)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(BF16)
        expected = x.double() @ weight.double().T
        assert_close("product", expected + bias.double(), linear(x, weight, bias), 4e-3)
        assert_close("logits", expected, logits(x, weight).double(), 4e-3)


@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
@pytest.mark.parametrize("outputs", [16, 32, 43, 100])
def test_a_gated_product_is_its_steps_one_by_one(activation: object, outputs: int) -> None:
    x, weight = torch.randn(70, 300).to(BF16), (torch.randn(2 * outputs, 300) / 17).to(BF16)
    apart = activation(x.double() @ weight.double().T)  # type: ignore[operator]
    assert_close("gated", apart, gated_linear(x, weight, None, activation), 1e-2)


def test_values_after_a_row_or_the_weight_are_not_multiplied() -> None:
    x, around = torch.randn(40, 70).to(BF16), torch.full((100, 70), torch.nan).to(BF16)
    around[20:57] = torch.randn(37, 70).to(BF16)
    assert_close("product", x.double() @ around[20:57].double().T, linear(x, around[20:57]), 4e-3)
    apart = torch.full((40, 90), torch.inf).to(BF16)
    apart[:, :70] = x
    assert torch.equal(linear(apart[:, :70], around[20:57]), linear(x, around[20:57]))


def test_a_row_is_the_same_in_any_larger_company() -> None:
    x, weight = torch.randn(1320, 2148).to(BF16), torch.randn(50, 2148).to(BF16)
    together = linear(x, weight)
    for size in (5, 33, 110, 660):
        assert torch.equal(torch.cat([linear(part, weight) for part in x.split(size)]), together)


@pytest.mark.parametrize("columns", [96, 704, 1030, 2177])
@pytest.mark.parametrize("tokens", [5, 64, 600])
def test_products_with_12_bits_have_the_bits_of_the_plain_weights(tokens: int, columns: int) -> None:
    plain = (torch.randn(74, columns) * torch.rand(74, 1).exp() / columns**0.5).to(BF16)
    plain[3, 5], plain[40, columns - 1] = 2.0**40, 2.0**-50
    x = torch.randn(tokens, columns).to(BF16)
    coded, same = pack_lossless(plain), PlainWeight(plain)
    assert torch.equal(coded.linear(x), same.linear(x))
    assert torch.equal(coded.gated(x, None, silu_and_mul), same.gated(x, None, silu_and_mul))


def attention_call(
    context: int, chunk: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch]:
    """Make a call with the last `chunk` tokens of a context, in unordered blocks between blocks of NaN."""
    blocks = -(-context // 16)
    q = torch.randn(chunk, heads, head_dim).to(BF16)
    caches = torch.full((2, 2 * blocks, 16, kv_heads, head_dim), torch.nan).to(BF16)
    table = 2 * torch.randperm(blocks) + 1
    for cache in caches:
        values = torch.randn(context, kv_heads, head_dim).to(BF16)
        for i, block in enumerate(table.tolist()):
            part = values[16 * i : 16 * i + 16]
            cache[block, : len(part)] = part
    starts, contexts = torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    return q, caches[0], caches[1], VarlenBatch(table[None], starts, contexts, (chunk,), (context,))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (8, 1, 128), (5, 5, 40), (6, 2, 42), (3, 3, 96)]
)
@pytest.mark.parametrize(("context", "chunk"), [(5, 1), (37, 37), (300, 129), (1000, 70)])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_is_what_it_is_in_fp64(
    context: int, chunk: int, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    q, k_cache, v_cache, batch = attention_call(context, chunk, heads, kv_heads, head_dim)
    keys, values = (
        cache[batch.block_tables[0]].flatten(0, 1)[:context].double().repeat_interleave(heads // kv_heads, 1)
        for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / head_dim**0.5
    at, last = torch.arange(context)[None], torch.arange(context - chunk, context)[:, None]
    seen = (at <= last) & (at > last - (window or context))
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    actual = prefill_attention(q, k_cache, v_cache, batch, AttentionRule(head_dim**-0.5, window))
    assert_close("attention", expected, actual, 8e-3)


def test_a_prompts_attention_is_the_same_however_it_is_cut() -> None:
    context = 330
    q, k_cache, v_cache, batch = attention_call(context, context, 6, 2, 64)
    rule = AttentionRule(0.125)
    whole = prefill_attention(q, k_cache, v_cache, batch, rule)
    for size in (7, 64, 150):
        parts = []
        for begin in range(0, context, size):
            end = min(begin + size, context)
            starts, contexts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, end - begin], [end]))
            cut = VarlenBatch(batch.block_tables, starts, contexts, (end - begin,), (end,))
            parts.append(prefill_attention(q[begin:end], k_cache, v_cache, cut, rule))
        assert torch.equal(torch.cat(parts), whole)
