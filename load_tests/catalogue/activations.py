"""The catalogue's entries of activations."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.elementwise import activation

_BANDWIDTH = Target(0.85, "copy")


def _cases(**more: float) -> tuple[Case, ...]:
    return tuple(_case(tokens, columns, more) for tokens, columns in ((0, 4), (1, 1), (3, 1025), (7, 44)))


def _bench(**more: float) -> tuple[Case, ...]:
    return tuple(_case(tokens, 14_336, more, _BANDWIDTH) for tokens in (64, 2048))


def _case(tokens: int, columns: int, more: dict[str, float], target: Target | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {"x": torch.randn(tokens, 2 * columns).to(dtype), **more}

    return Case(f"{tokens} x 2 x {columns}", make, target)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up


def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-alpha * gate).exp()) * (up + 1)


def _halved(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(x: Tensor, **more: Any) -> Tensor:
        return formula(*x.chunk(2, dim=-1), **more)

    return reference


def _cost(arguments: Arguments) -> Cost:
    """Return the cost: two values read for each one written."""
    return Cost(size(arguments["x"]) * 3 // 2)


def _operation(name: str, formula: Callable[..., Tensor], roundings: float, **more: float) -> Operation:
    return Operation(
        name=name,
        function=getattr(activation, name),
        reference=_halved(formula),
        roundings=roundings,
        arithmetic=2,
        cases=_cases(**more),
        bench=_bench(**more),
        cost=_cost,
    )


# Tolerance: one rounding of relu, which is exact, and one of the square.
_RELU2 = Operation(
    name="relu2",
    function=activation.relu2,
    reference=lambda x: x.clamp(min=0) ** 2,
    roundings=2,
    cases=_cases(),
    bench=_bench(),
    cost=lambda arguments: Cost(2 * size(arguments["x"])),
)


def _gating(tokens: int, groups: int, numbers: int, by_sigmoid: bool, target: Target | None = None) -> Case:
    """Make a case whose gates are between the queries of a projection."""

    def make(dtype: torch.dtype) -> Arguments:
        gates = torch.randn(tokens, 2 * groups, numbers).to(dtype)[:, 1::2]
        return {"x": torch.randn(tokens, groups, numbers).to(dtype), "gates": gates, "by_sigmoid": by_sigmoid}

    return Case(f"{tokens} x {groups} x {numbers}" + (" by sigmoid" if by_sigmoid else ""), make, target)


# Tolerance: torch's form rounds after the sigmoid and after the product.
_APPLY_GATE = Operation(
    name="apply_gate",
    function=activation.apply_gate,
    reference=lambda x, gates, by_sigmoid: x * (1 / (1 + (-gates).exp()) if by_sigmoid else gates),
    roundings=2,
    arithmetic=2,
    cases=tuple(
        _gating(*shape, by_sigmoid)
        for shape in ((0, 2, 4), (1, 1, 1), (3, 2, 1025), (7, 5, 44))
        for by_sigmoid in (False, True)
    ),
    bench=(_gating(64, 16, 256, True), _gating(2048, 16, 256, True)),
    cost=lambda arguments: Cost(3 * size(arguments["x"])),
)
# Tolerance: torch's plain form rounds after the activation and after the product; in fp32, the error of the exponential counts. The clamped form adds
# 1 to an `up` that may be near -1, so that earlier roundings become a larger part of the result.
OPERATIONS = (
    _operation("silu_and_mul", _silu, 2),
    _operation("gelu_tanh_and_mul", _gelu_tanh, 2),
    _operation("clamped_swiglu", _clamped, 3, alpha=1.702, limit=0.9),
    _RELU2,
    _APPLY_GATE,
)
