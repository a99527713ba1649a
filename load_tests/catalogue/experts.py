"""The catalogue's entries of mixtures of experts: routing, and the experts' feed-forwards."""

from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from load_tests.catalogue.matrices import plain_weight, random_fp8, random_int4, random_mxfp4
from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels import moe
from pilotlight.kernels.elementwise.activation import clamped_swiglu, gelu_tanh_and_mul, relu2, silu_and_mul
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import GatedActivation, Weight

Storage = Literal["plain", "int4", "mxfp4", "fp8"]


def _distinct(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Return logits that are distinct within each row: multiples of 1/16, which every type represents."""
    rows = [torch.randperm(experts) - experts // 2 for _ in range(tokens)]
    return (torch.stack(rows) / 16 if rows else torch.empty(0, experts)).to(dtype)


def _logits(tokens: int, experts: int, top_k: int, renormalise: bool) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {"logits": _distinct(tokens, experts, dtype), "top_k": top_k, "renormalise": renormalise}

    return Case(f"{tokens} tokens, {top_k} of {experts}" + (", renormalised" if renormalise else ""), make)


def _grouped(tokens: int, experts: int, top_k: int, groups: int, top_groups: int, renormalise: bool = True) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {
            "logits": _distinct(tokens, experts, dtype), "bias": torch.randn(experts) / 4, "top_k": top_k, "groups": groups,
            "top_groups": top_groups, "renormalise": renormalise, "scale": 2.5,
        }  # fmt: skip

    return Case(f"{tokens} tokens, {top_k} of {experts} in {top_groups} of {groups} groups", make)


def _routed(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    probabilities, ids = logits.softmax(-1).sort(descending=True)
    probabilities = probabilities[:, :top_k]
    return probabilities / probabilities.sum(-1, keepdim=True) if renormalise else probabilities, ids[:, :top_k]


def _routed_in_groups(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    weights, all_ids = torch.empty(logits.shape[0], top_k, dtype=torch.float64), []
    for token, (score, biased) in enumerate(zip(scores, scores + bias, strict=True)):
        members = biased.view(groups, -1)
        best = members.sort(descending=True).values[:, :2].sum(-1).sort(descending=True).indices[:top_groups]
        allowed = torch.full_like(members, -torch.inf)
        allowed[best] = members[best]
        ids = allowed.flatten().sort(descending=True).indices[:top_k]
        chosen = score[ids]
        weights[token] = chosen / chosen.sum() * scale if renormalise else chosen * scale
        all_ids.append(ids)
    return weights, torch.stack(all_ids) if all_ids else torch.empty(0, top_k, dtype=torch.int64)


def _weight(storage: Storage, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    if storage == "int4":
        return random_int4(shape, 32, zeros=True, dtype=dtype)
    if storage == "mxfp4":
        return random_mxfp4(shape)
    if storage == "fp8":
        return random_fp8(shape, 128, 128)
    return PlainWeight((torch.randn(shape) / shape[-1] ** 0.5).to(dtype))


def _experts(
    tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, *, storage: Storage = "plain", biased: bool = False,
    activation: GatedActivation = silu_and_mul, unwanted: int = 0, target: Target | None = None,
) -> Case:  # fmt: skip
    """Make a case. `unwanted`: the number of experts that no token is routed to."""

    def make(dtype: torch.dtype) -> Arguments:
        made: dict[str, Any] = {
            "x": torch.randn(tokens, hidden).to(dtype),
            "weights": torch.rand(tokens, top_k),
            "expert_ids": torch.rand(tokens, experts - unwanted).argsort(-1)[:, :top_k].contiguous(),
            "gate_up": _weight(storage, (experts, (1 if activation is relu2 else 2) * intermediate, hidden), dtype),
            "down": _weight(storage, (experts, hidden, intermediate), dtype),
            "activation": activation,
        }
        if biased:
            made["gate_up_bias"] = torch.randn(experts, made["gate_up"].shape[1]).to(dtype)
            made["down_bias"] = torch.randn(experts, hidden).to(dtype)
        return made

    name = f"{tokens} x {hidden}, {top_k} of {experts} x {intermediate} {storage}"
    kind = (
        ""
        if activation is silu_and_mul
        else " gelu"
        if activation is gelu_tanh_and_mul
        else " relu2"
        if activation is relu2
        else " clamped"
    )
    return Case(name + kind + (" biased" if biased else ""), make, target)


def _mixture(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Weight, down: Weight, activation: GatedActivation,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    gates, downs = plain_weight(gate_up), plain_weight(down)
    out = torch.zeros(x.shape[0], downs.shape[1], dtype=x.dtype)
    for token, (its_weights, ids) in enumerate(zip(weights, expert_ids.tolist(), strict=True)):
        for weight, i in zip(its_weights, ids, strict=True):
            inner = gates[i] @ x[token] + (0 if gate_up_bias is None else gate_up_bias[i])
            outer = downs[i] @ _activated(inner, activation) + (0 if down_bias is None else down_bias[i])
            out[token] += weight * outer
    return out


def _activated(inner: Tensor, activation: GatedActivation) -> Tensor:
    if activation is relu2:
        return inner.clamp(min=0) ** 2
    gate, up = inner.chunk(2)
    if isinstance(activation, partial):
        alpha, limit = activation.keywords["alpha"], activation.keywords["limit"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if activation is gelu_tanh_and_mul else F.silu(gate)) * up


def _grouped_mm(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: PlainWeight, down: PlainWeight, activation: GatedActivation
) -> Tensor:
    """Run torch's own product of all experts at once, with the same steps around it."""
    ids, order = expert_ids.flatten().sort(stable=True)
    experts = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(ids, experts, right=True).int()
    inner = torch._grouped_mm(x.index_select(0, order // expert_ids.shape[1]), gate_up.values.mT, offs=ends)
    outer = torch._grouped_mm(activation(inner), down.values.mT, offs=ends)
    by_token = torch.empty_like(outer).index_copy_(0, order, outer).view(*expert_ids.shape, -1)
    return torch.einsum("tk,tkh->th", weights, by_token.float()).to(x.dtype)


def _in_16_bits(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Weight, down: Weight, activation: GatedActivation,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run the same operation with plain weights for comparison.

    The weights are different, so the result is, too.
    """
    first, second = (_random_plain(weight.shape, x.dtype, x.device) for weight in (gate_up, down))
    result: Tensor = moe.moe_experts(x, weights, expert_ids, first, second, activation, gate_up_bias, down_bias)
    return result


@lru_cache(maxsize=2)
def _random_plain(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PlainWeight:
    return PlainWeight(torch.randn(shape, dtype=dtype, device=device).div_(shape[-1] ** 0.5))


def _cost(arguments: Arguments) -> Cost:
    """Count the weights of the experts in use, each once."""
    x, ids, gate_up, down = (arguments[name] for name in ("x", "expert_ids", "gate_up", "down"))
    stored = [*gate_up.parts, *down.parts]
    experts = gate_up.shape[0]
    wanted = ids.unique().numel()
    hidden = x.shape[1]
    intermediate = gate_up.shape[1] // 2
    return Cost(size(*stored) * wanted // experts + 2 * size(x), 6 * ids.numel() * hidden * intermediate)


_CLAMPED = partial(clamped_swiglu, alpha=1.702, limit=0.5)  # low enough to take effect
_BY_TORCH = Target(0.95, "rival")

ROUTE = Operation(
    name="route",
    function=moe.route,
    reference=_routed,
    roundings=12,  # in fp32: those of an exponential, of a sum over the experts, and of a quotient
    dtypes=(torch.float32,),
    cases=tuple(
        _logits(*shape, renormalise)
        for shape in ((7, 8, 2), (5, 5, 3), (3, 128, 8), (1, 1, 1), (0, 4, 2))
        for renormalise in (False, True)
    ),
    bench=(_logits(64, 128, 8, True), _logits(8192, 128, 8, True)),
    cost=lambda arguments: Cost(size(arguments["logits"]) + 12 * arguments["top_k"] * arguments["logits"].shape[0]),
)
ROUTE_IN_GROUPS = Operation(
    name="route_in_groups",
    function=moe.route_in_groups,
    reference=_routed_in_groups,
    roundings=12,
    dtypes=(torch.float32,),
    cases=(
        _grouped(5, 32, 4, 8, 3), _grouped(3, 21, 4, 3, 2, renormalise=False), _grouped(2, 256, 8, 8, 4), _grouped(4, 48, 6, 1, 1),
        _grouped(0, 8, 2, 4, 2),
    ),
    bench=(_grouped(64, 256, 8, 8, 4), _grouped(8192, 256, 8, 8, 4)),
    cost=lambda arguments: Cost(size(arguments["logits"], arguments["bias"]) + 12 * arguments["top_k"] * arguments["logits"].shape[0]),
)  # fmt: skip
# Tolerance: weights, values between the two products and the result are rounded to the storage type. A rounding counts more where the experts'
# results cancel.
MOE_EXPERTS = Operation(
    name="moe_experts",
    function=moe.moe_experts,
    reference=_mixture,
    roundings=8,
    cases=(
        _experts(1, 42, 27, 5, 3),
        _experts(16, 64, 30, 8, 2, unwanted=3),
        _experts(37, 42, 70, 3, 2, activation=gelu_tanh_and_mul),
        _experts(7, 66, 20, 4, 4, biased=True, activation=_CLAMPED),
        _experts(200, 40, 12, 2, 1),
        _experts(9, 33, 21, 4, 2, biased=True, activation=relu2),
        _experts(40, 64, 32, 3, 2, storage="int4", activation=relu2),
        _experts(300, 10, 150, 2, 2),
        _experts(3, 64, 32, 4, 2, storage="int4"),
        _experts(18, 96, 64, 3, 2, storage="mxfp4", biased=True, activation=_CLAMPED),
        _experts(5, 200, 136, 4, 1, storage="fp8"),
        _experts(0, 8, 8, 4, 2),
    ),
    bench=(
        _experts(1, 2048, 768, 128, 8, target=_BY_TORCH),
        _experts(64, 2048, 768, 128, 8, target=_BY_TORCH),
        _experts(8192, 2048, 768, 128, 8, target=_BY_TORCH),
        _experts(64, 4096, 14336, 8, 2, target=_BY_TORCH),
        _experts(4096, 4096, 14336, 8, 2, target=_BY_TORCH),
    ),
    cost=_cost,
    rivals={"torch._grouped_mm": _grouped_mm},
)
PACKED_EXPERTS = Operation(
    name="packed_experts",
    function=moe.moe_experts,
    reference=_mixture,
    roundings=8,
    cases=(
        _experts(2, 32, 32, 3, 2, storage="mxfp4"),
        _experts(13, 160, 96, 3, 2, storage="mxfp4", biased=True, activation=_CLAMPED),
        _experts(30, 96, 160, 4, 2, storage="int4"),
        _experts(300, 32, 64, 2, 1, storage="mxfp4", biased=True, activation=_CLAMPED),
        _experts(270, 64, 32, 2, 1, storage="int4"),
    ),
    bench=(
        *(
            _experts(m, 2880, 2880, 32, 4, storage="mxfp4", biased=True, activation=_CLAMPED)
            for m in (1, 8, 64, 512, 4096)
        ),
        *(_experts(m, 2048, 768, 128, 8, storage="int4") for m in (1, 8, 64, 512)),
        _experts(64, 2048, 768, 128, 8, storage="fp8"),
    ),
    cost=_cost,
    rivals={"moe_experts in 16 bits": _in_16_bits},
)
OPERATIONS = (ROUTE, ROUTE_IN_GROUPS, MOE_EXPERTS, PACKED_EXPERTS)
