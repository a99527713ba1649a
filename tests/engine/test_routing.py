"""The choice and weights of experts by the routers of DeepSeek-V3, Kimi K2.5 and Llama 4, compared with the formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import Routing
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.moe import Experts, InputScaledExperts, SparseMLP
from pilotlight.engine.layers.routing import GroupedRouter, SigmoidRouter
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.closeness import assert_close

HIDDEN, INNER, TOKENS = 64, 24, 9
CONTEXT = Context(Batch(torch.empty(0), torch.empty(0), (), 0))


def random(*shape: int) -> PlainWeight:
    return PlainWeight(torch.randn(shape) / shape[-1] ** 0.5)


def feed_forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.double().T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.double().T


def random_parts(num_experts: int) -> tuple[PlainWeight, PlainWeight, GatedMLP]:
    shared = GatedMLP(Linear(random(2 * INNER, HIDDEN)), Linear(random(HIDDEN, INNER)))
    return random(num_experts, 2 * INNER, HIDDEN), random(num_experts, HIDDEN, INNER), shared


def of_shared(x: torch.Tensor, shared: GatedMLP) -> torch.Tensor:
    return feed_forward(x, *(linear.weight.unpack(torch.float64) for linear in (shared.gate_up_proj, shared.down_proj)))


@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [(256, Routing(8, True, 2.5, "sigmoid", 8, 4)), (384, Routing(8, True, 2.827, "sigmoid"))],
    ids=["DeepSeek-V3", "Kimi K2.5"],
)
def test_sigmoids_with_a_bias_choose_and_without_it_weigh(num_experts: int, rule: Routing) -> None:
    gate_up, down, shared = random_parts(num_experts)
    gate, bias = random(num_experts, HIDDEN), torch.randn(num_experts) / 10
    x = torch.randn(TOKENS, HIDDEN)
    got = SparseMLP(GroupedRouter(Linear(gate), bias, rule), Experts(gate_up, down), shared)(x, CONTEXT)
    wide = x.double()
    scores = (wide @ gate.values.double().T).sigmoid()
    biased = scores + bias.double()
    of_groups = biased.view(TOKENS, rule.groups, -1).sort(dim=-1, descending=True).values[..., :2].sum(-1)
    left = of_groups.sort(dim=-1, descending=True).indices[:, : rule.top_groups]
    expected = of_shared(wide, shared)
    for token in range(TOKENS):
        size, its_groups, row = num_experts // rule.groups, left[token].tolist(), biased[token].tolist()
        ranked = sorted((-row[i], i) for i in range(num_experts) if i // size in its_groups)
        chosen = [i for _, i in ranked[: rule.top_k]]
        total = scores[token, chosen].sum()
        for i in chosen:
            weight = scores[token, i] / total * rule.scale
            expected[token] += weight * feed_forward(wide[token], gate_up.values[i], down.values[i])
    assert_close("mixed", expected, got, 2e-6)


@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 1), (128, 1), (16, 2)])
def test_a_sigmoid_scales_what_an_expert_is_given(num_experts: int, top_k: int) -> None:
    gate_up, down, shared = random_parts(num_experts)
    gate, x = random(num_experts, HIDDEN), torch.randn(TOKENS, HIDDEN)
    layer = SparseMLP(SigmoidRouter(Linear(gate), top_k), InputScaledExperts(gate_up, down), shared)
    wide = x.double()
    logits = wide @ gate.values.double().T
    expected = of_shared(wide, shared)
    for token in range(TOKENS):
        for i in logits[token].sort(descending=True).indices[:top_k].tolist():
            given = wide[token] * logits[token, i].sigmoid()
            expected[token] += feed_forward(given, gate_up.values[i], down.values[i])
    assert_close("mixed", expected, layer(x, CONTEXT), 2e-6)


def test_large_logits_choose_by_their_size_though_their_sigmoids_are_equal() -> None:
    router = SigmoidRouter(Linear(PlainWeight(torch.tensor([[30.0], [40.0], [35.0]]))), 2)
    weights, ids = router(torch.ones(1, 1), CONTEXT)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.0, 1.0]]
