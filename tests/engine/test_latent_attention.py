"""One layer of latent attention at the sizes of DeepSeek-V3 and Kimi K2.5, compared with the unabsorbed formulas in fp64."""

import pytest
import torch

from load_tests.catalogue.paged_cases import Heads, paged, varlen
from pilotlight.engine.core.chunk_steps import scratch_step
from pilotlight.engine.description.rotary_scaling import RotaryRule
from pilotlight.engine.description.shapes import LatentShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.packed_step import build_batch
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, CacheSegment
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mla.expanded_attention import attend, is_cheaper
from pilotlight.engine.layers.mla.latent_attention import LatentAttention, LatentQueries
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.rotary import RotaryTable
from pilotlight.kernels.attention.mla import mla_prefill
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.closeness import assert_close

HIDDEN, LATENT, ROTARY, KEY, VALUE = 160, 512, 64, 128, 128
CPU = torch.device("cpu")


def random_layer(heads: int, query_rank: int | None) -> LatentAttention:
    shape = LatentShape(heads, query_rank, LATENT, ROTARY, KEY, VALUE, 0.1, 0)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(PlainWeight(torch.randn(rows, columns) / columns**0.5))

    def norm(size: int) -> RMSNorm:
        return RMSNorm(1 + torch.randn(size) / 5, 1e-6)

    down, query_norm = (None, None) if query_rank is None else (linear(query_rank, HIDDEN), norm(query_rank))
    queries = LatentQueries(down, query_norm, linear(heads * shape.query, query_rank or HIDDEN), shape.query)
    up = torch.randn(heads, KEY + VALUE, LATENT) / LATENT**0.5
    return LatentAttention(
        queries, linear(LATENT + ROTARY, HIDDEN), norm(LATENT), up, linear(HIDDEN, heads * VALUE), shape
    )


def by_formula(layer: LatentAttention, x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Return the layer's output by the published formulas in fp64, with keys and values of every head."""
    x, scale = x.double(), layer.shape.scale

    def times(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return x @ linear.weight.unpack(torch.float64).T

    def normed(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()

    angles = torch.complex(table.cos[: len(x)].double(), table.sin[: len(x)].double())

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles.view(len(x), *[1] * (x.dim() - 2), -1)).flatten(-2)

    queries = layer.queries
    asked = (
        x if queries.down_proj is None or queries.norm is None else normed(queries.norm, times(queries.down_proj, x))
    )
    q_key, q_rotary = torch.split(
        torch.unflatten(times(queries.proj, asked), 1, (-1, queries.query)), [KEY, ROTARY], dim=2
    )
    latent, k_rotary = torch.split(times(layer.latent_proj, x), [LATENT, ROTARY], dim=1)
    latent = normed(layer.latent_norm, latent)
    ups = torch.split(layer.up_proj.double(), [KEY, VALUE], dim=1)
    keys, values = (torch.einsum("cl,hnl->chn", latent, up) for up in ups)
    scores = torch.einsum("thn,chn->htc", q_key, keys) + torch.einsum("thr,cr->htc", turned(q_rotary), turned(k_rotary))
    unseen = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = (scores * scale).masked_fill(unseen, -torch.inf).softmax(-1)
    return times(layer.o_proj, torch.einsum("htc,chv->thv", weights, values).flatten(1))


@pytest.mark.long
@pytest.mark.parametrize(("heads", "query_rank"), [(128, 1536), (64, 1536), (64, None)])
def test_a_prompt_in_chunks_and_a_decode_are_the_formula_at_full_size(heads: int, query_rank: int | None) -> None:
    layer, x = random_layer(heads, query_rank), torch.randn(45, HIDDEN)
    table = RotaryTable(RotaryRule("default", 50_000.0), ROTARY, 64, CPU)
    table.compute()
    expected = by_formula(layer, x, table)
    layout = CacheLayout([CachedLayer((CacheSegment("latent", 1, LATENT + ROTARY),))], 16, torch.float32)
    caches, got, begin, ways = layout.views(layout.new_blocks(3, CPU)), [], 0, []
    for end in (32, 36, 44, 45):
        batch = build_batch(scratch_step([9] * end, begin, 16)[0], CPU)
        group = batch.groups[0]
        assert (group.decode is not None) == (end - begin == 1)
        ways.append(group.prefill is not None and is_cheaper(group.prefill, 16, 4, layer.shape))
        got.append(layer(x[begin:end], Context(batch, caches, (table.at(batch.positions),))))
        begin = end
    assert ways == [True, False, False, False]
    assert_close("attended", expected, torch.cat(got), 3e-6)


def test_prompts_behind_prefixes_are_the_same_in_either_form() -> None:
    heads, q_lens, lens = 6, (9, 30, 1), (40, 30, 77)
    layer = random_layer(heads, None)
    cache, _, tables, _ = paged(lens, Heads(heads, 1, LATENT + ROTARY, 16), torch.float32)
    q_key, q_rotary = torch.randn(sum(q_lens), heads, KEY), torch.randn(sum(q_lens), heads, ROTARY)
    batch = varlen(tables, q_lens, lens)
    absorbed = layer.expanded(mla_prefill(layer.absorbed(q_key), q_rotary, cache.squeeze(2), batch, layer.shape.scale))
    assert_close("values", absorbed, attend(q_key, q_rotary, layer.up_proj, cache.squeeze(2), batch, layer.shape), 3e-6)


@pytest.mark.parametrize(
    ("q_lens", "lens", "is_expanded"),
    [
        ((2048,), (2048,), True),
        ((1,), (4000,), False),
        ((100,), (4000,), False),
        ((300,), (4000,), True),
        ((2048,), (10_000,), True),
        ((2048,), (11_000,), False),  # too many keys and values for the memory limit
        ((300, 2), (300, 4000), False),  # the block table of the shorter one is padded
    ],
)
def test_the_form_that_takes_fewer_products_is_chosen(
    q_lens: tuple[int, ...], lens: tuple[int, ...], is_expanded: bool
) -> None:
    shape = LatentShape(16, 1536, LATENT, ROTARY, KEY, VALUE, 0.1, 0)
    batch = varlen(torch.empty(len(lens), max(lens) // 16, dtype=torch.int64), q_lens, lens)
    assert is_cheaper(batch, 16, 2, shape) == is_expanded
