"""Activations of feed-forwards, most of them gated, and gates of mixed tokens.

A feed-forward's gate and up are side by side in one input, as the fused matmul writes them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, ArgumentCheck, placed
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation

Activation = Callable[[torch.Tensor], torch.Tensor]


def _check(operation: str, x: torch.Tensor, *_: float) -> None:
    if not (x.ndim == 2 and x.dtype in FLOATS and x.shape[1] and not x.shape[1] & 1 and x.stride(1) == 1 and placed(x)):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens columns", dense=1)
        check.require("x", x.shape[1] % 2 == 0, f"has {x.shape[1]} columns; wanted an even number: half gate, half up")


@operation(_check, triton="elementwise.activation", native=partial(ops.gated_activation, activation=ops.SILU))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [tokens, intermediate], for x [tokens, 2 * intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@operation(_check, triton="elementwise.activation", native=partial(ops.gated_activation, activation=ops.GELU_TANH))
def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, [tokens, intermediate], for x [tokens, 2 * intermediate]; gelu by tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@operation(_check, triton="elementwise.activation")
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1), [tokens, intermediate], with clamped inputs.

    x [tokens, 2 * intermediate]; the gate is clamped from above, up from both sides.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _check_plain(operation: str, x: torch.Tensor) -> None:
    if not (x.ndim == 2 and x.dtype in FLOATS and x.shape[1] and x.stride(1) == 1 and placed(x)):
        ArgumentCheck(operation).tensor("x", x, "tokens columns", dense=1)


@operation(_check_plain, triton="elementwise.activation")
def relu2(x: torch.Tensor) -> torch.Tensor:
    """Return the square of relu(x), [tokens, columns], an activation without a gate."""
    return F.relu(x).square()


def _check_gates(operation: str, x: torch.Tensor, gates: torch.Tensor, by_sigmoid: bool) -> None:
    if not (
        x.ndim == 3
        and x.dtype in FLOATS
        and gates.dtype == x.dtype
        and gates.shape == x.shape
        and x.stride(2) == gates.stride(2) == 1
        and placed(x, gates)
    ):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens groups numbers", dense=1)
        check.tensor("gates", gates, "tokens groups numbers", (x.dtype,), dense=1)


@operation(_check_gates, triton="elementwise.activation", native=ops.apply_gate)
def apply_gate(x: torch.Tensor, gates: torch.Tensor, by_sigmoid: bool) -> torch.Tensor:
    """Return x * sigmoid(gates), or x * gates; all [tokens, groups, numbers]."""
    return x * (gates.sigmoid() if by_sigmoid else gates)


# The numbers in C of the activations that the C library fuses with the preceding product.
_FUSED: dict[Activation, int] = {silu_and_mul: ops.SILU, gelu_tanh_and_mul: ops.GELU_TANH}


def gated_native(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return the C library's form of a product with an activation, fused with it if possible.

    `product(library, x, weight, bias, activation)`: C's form of the product; 0 for no activation.
    """

    def form(library: Library, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Any:
        fused = _FUSED.get(activation, 0)
        y = product(library, x, weight, bias, fused)
        return y if y is None or fused else activation(y)

    return form
