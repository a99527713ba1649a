"""The order of tokens by expert, and the table of tiles, both ways of making them; what Triton's experts refuse."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernels.activation import silu_and_mul
from kernels.checks import ArgumentError
from kernels.int4 import Int4Weight
from kernels.triton import moe, routing


@pytest.fixture(params=[0, 4096], ids=["sorted by torch", "each pair finds its place"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_MOST_COMPARED", request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("rows_a_tile", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (1, 6, 3), (16, 42, 2), (123, 6, 4), (431, 130, 1)]
)
def test_every_pair_lies_in_one_tile_of_its_expert(tokens: int, experts: int, top_k: int, rows_a_tile: int) -> None:
    ids = torch.rand(tokens, experts).argsort(-1)[:, :top_k].contiguous()
    ids[ids == experts // 2] = 0  # an expert that nobody wants, and one that many do
    order, table = moe.by_expert(ids, experts, rows_a_tile)
    assert torch.equal(order, ids.flatten().argsort(stable=True))
    covered: list[int] = []
    for expert, begin, end in table.tolist():
        if expert >= 0:
            assert 0 < end - begin <= rows_a_tile
            assert bool((ids.flatten()[order[begin:end]] == expert).all())
            covered += range(begin, end)
    assert covered == list(range(tokens * top_k))


def _call(**changes: object) -> torch.Tensor:
    arguments = {
        "x": torch.randn(3, 32), "weights": torch.rand(3, 2), "expert_ids": torch.zeros(3, 2, dtype=torch.int64),
        "gate_up": torch.randn(4, 20, 32), "down": torch.randn(4, 32, 10), "activation": silu_and_mul,
    } | changes  # fmt: skip
    return moe.moe_experts(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.randn(32, 3).T}, r"moe_experts: x must be contiguous along its rows"),
        ({"x": torch.randn(3, 30)}, "moe_experts: x has 30 columns and the weight 32"),
        ({"x": torch.randn(3, 32).double()}, "moe_experts: x has type torch.float64"),
        ({"down": torch.randn(4, 32, 10).half()}, "moe_experts: down has type torch.float16 and x torch.float32"),
        ({"gate_up": torch.randn(4, 20, 64)[..., ::2]}, "moe_experts: gate_up must be contiguous along its last dimension"),
        ({"weights": torch.rand(3, 1)}, r"weights have shape \[3, 1\] and expert_ids \[3, 2\]"),
        ({"expert_ids": torch.zeros(2, 2, dtype=torch.int64), "weights": torch.rand(2, 2)}, "expert_ids are for 2 tokens and x has 3"),
        ({"weights": torch.rand(2, 3).T}, "weights must be contiguous"),
        ({"activation": torch.relu}, "activation is .*relu.*; it must be silu_and_mul"),
        ({"activation": partial(torch.relu)}, "activation is"),
        (
            {"gate_up": Int4Weight(torch.zeros(4, 20, 16).byte(), torch.ones(4, 20, 2), None, 32, 32)},
            "holds 16 bytes and 2 scales a row; 32 columns in groups of 32 make 16 and 1",
        ),
        (
            {"gate_up": Int4Weight(torch.zeros(4, 20, 16).byte(), torch.ones(4, 20, 1), None, 32, 32, torch.arange(32))},
            "weight has its columns in an order of their own",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        _call(**changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 3, 1), "groups are 3, of which 1 are chosen, for 16 experts"),
        ((4, 4, 5), "groups are 4, of which 5 are chosen"),
        ((4, 16, 2), "groups are 16, of which 2 are chosen, for 16 experts; they must divide them, with two or more"),
        ((5, 4, 1), "top_k is 5; the groups that are chosen have 4"),
        ((0, 4, 1), "top_k is 0; it must be from 1"),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_named(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        routing.route_in_groups(torch.randn(2, 16), torch.zeros(16), *arguments, renormalise=True, scale=1.0)


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    weights, ids = routing.route(torch.zeros(2, 10), 3, renormalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_no_numbers_name_experts_that_there_are() -> None:
    for chosen in (
        routing.route(torch.full((2, 10), torch.nan), 3, renormalise=True),
        routing.route_in_groups(torch.full((2, 10), torch.nan), torch.zeros(10), 3, 5, 2, renormalise=True, scale=1.0),
    ):
        assert bool((chosen[1] < 10).all())
        assert bool((chosen[1] >= 0).all())
