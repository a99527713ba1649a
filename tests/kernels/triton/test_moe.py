"""The order of tokens by expert and the table of tiles, each from both algorithms; refused calls of Triton's experts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import pilotlight.kernels.moe
from load_tests.catalogue.matrices import random_int4, random_mxfp4
from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.triton import moe, routing
from tests.kernels.conftest import DEVICE


@pytest.mark.parametrize("most_compared", [0, 4096], ids=["sorted by torch", "each pair finds its place"])
@pytest.mark.parametrize("rows_a_tile", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (1, 6, 3), (16, 42, 2), (123, 6, 4), (431, 130, 1)]
)
def test_every_pair_lies_in_one_tile_of_its_expert(
    tokens: int, experts: int, top_k: int, rows_a_tile: int, most_compared: int
) -> None:
    ids = torch.rand(tokens, experts).argsort(-1)[:, :top_k].contiguous()
    ids[ids == experts // 2] = 0  # one expert gets no token, and one gets many
    order, table = moe.by_expert(ids, experts, rows_a_tile, most_compared)
    assert torch.equal(order, ids.flatten().argsort(stable=True))
    covered: list[int] = []
    for expert, begin, end in table.tolist():
        if expert >= 0:
            assert 0 < end - begin <= rows_a_tile
            assert bool((ids.flatten()[order[begin:end]] == expert).all())
            covered += range(begin, end)
    assert covered == list(range(tokens * top_k))


def _call(form: Callable[..., torch.Tensor], **changes: object) -> torch.Tensor:
    arguments = {
        "x": torch.randn(3, 32), "weights": torch.rand(3, 2), "expert_ids": torch.zeros(3, 2, dtype=torch.int64),
        "gate_up": PlainWeight(torch.randn(4, 20, 32)), "down": PlainWeight(torch.randn(4, 32, 10)), "activation": silu_and_mul,
    } | changes  # fmt: skip
    return form(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (lambda: {"x": torch.randn(3, 30)}, r"gate_up.values has shape \[4, 20, 32\], wanted .* with hidden = 30 as x has it"),
        (lambda: {"x": torch.randn(3, 32).double()}, "(gate_up.values has dtype float32, wanted|x has dtype) float64"),  # a GPU refuses float64
        (lambda: {"down": PlainWeight(torch.randn(4, 32, 10).half())}, "down.values has dtype float16, wanted float32"),
        (lambda: {"gate_up": PlainWeight(torch.randn(4, 20, 64)[..., ::2])}, "gate_up.values has stride 2 in dimension 2, wanted 1"),
        (lambda: {"weights": torch.rand(3, 1)}, r"expert_ids has shape \[3, 2\], wanted .* with top_k = 1 as weights has it"),
        (lambda: {"expert_ids": torch.zeros(2, 2, dtype=torch.int64)}, r"expert_ids has shape \[2, 2\], wanted .* with tokens = 3"),
        (
            lambda: {"gate_up": Int4Weight(torch.zeros(4, 20, 16).byte(), torch.ones(4, 20, 2), None, 32, 32)},
            r"gate_up.scales has shape \[4, 20, 2\], wanted .* with gate_up.groups = 1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_named(changes: Callable[[], dict[str, object]], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^moe_experts: {words}"):
        _call(pilotlight.kernels.moe.moe_experts, **changes())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": torch.relu}, "activation is .*relu.*; it must be silu_and_mul"),
        ({"activation": partial(torch.relu)}, "activation is"),
        (
            {"gate_up": Int4Weight(torch.zeros(4, 20, 16).byte(), torch.ones(4, 20, 1), None, 32, 32, torch.arange(32))},
            "gate_up has permuted columns",
        ),
    ],
)  # fmt: skip
def test_what_only_tritons_form_cannot_compute_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^moe_experts: {words}"):
        _call(moe.moe_experts, **changes)


def test_numbers_that_lie_apart_are_read_as_they_are() -> None:
    given = {
        "x": torch.randn(32, 3).T,
        "weights": torch.rand(2, 3).T,
        "gate_up": PlainWeight(torch.randn(4, 20, 32)),
        "down": PlainWeight(torch.randn(4, 32, 10)),
    }
    expected = _call(pilotlight.kernels.moe.moe_experts, **given)
    assert torch.allclose(_call(moe.moe_experts, **given), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 3, 1), "groups is 3, which 16 experts cannot fill evenly"),
        ((4, 4, 5), "top_groups is 5, wanted 1 to 4"),
        ((4, 16, 2), "groups are of one expert each"),
        ((5, 4, 1), "top_k is 5, wanted 1 to 4"),
        ((0, 4, 1), "top_k is 0, wanted 1 to 4"),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_named(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pilotlight.kernels.moe.route_in_groups(
            torch.randn(2, 16), torch.zeros(16), *arguments, renormalise=True, scale=1.0
        )


@pytest.mark.long
@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_experts_that_are_decoded_into_memory_are_the_plain_ones(at_a_time: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    gate_up, down = random_mxfp4((5, 64, 32)), random_int4((5, 32, 32), 32, zeros=True, dtype=dtype)
    plain = PlainWeight(gate_up.unpack(dtype)), PlainWeight(down.unpack(dtype))
    limits = moe.DecodingLimits(0, 0, scratch_bytes=at_a_time * 64 * 32 * dtype.itemsize)
    x, weights, ids = (
        torch.randn(20, 32).to(dtype),
        torch.rand(20, 2),
        torch.rand(20, 5).argsort(-1)[:, :2].contiguous(),
    )
    biases = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
    expected = moe.moe_experts(x, weights, ids, *plain, silu_and_mul, *biases)
    assert torch.equal(moe.moe_experts(x, weights, ids, gate_up, down, silu_and_mul, *biases, limits), expected)


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
