"""Activations of feed-forwards, most of them gated, and gates of mixed tokens.

A feed-forward's gate and up are side by side in one input, as the fused matmul writes them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation

Activation = Callable[[torch.Tensor], torch.Tensor]
_silu = partial(ops.gated_activation, activation=ops.SILU)
_gelu = partial(ops.gated_activation, activation=ops.GELU_TANH)


def _check(check: ArgumentCheck, x: torch.Tensor, *_: float) -> None:
    check.tensor("x", x, "tokens columns", dense=1)
    check.require("x", x.shape[1] % 2 == 0, f"has {x.shape[1]} columns; wanted an even number: half gate, half up")


@operation(_check, triton="elementwise.activation", native=_silu, guards_itself=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [tokens, intermediate], for x [tokens, 2 * intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@operation(_check, triton="elementwise.activation", native=_gelu, guards_itself=True)
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


def _check_plain(check: ArgumentCheck, x: torch.Tensor) -> None:
    check.tensor("x", x, "tokens columns", dense=1)


@operation(_check_plain, triton="elementwise.activation")
def relu2(x: torch.Tensor) -> torch.Tensor:
    """Return the square of relu(x), [tokens, columns], an activation without a gate."""
    return F.relu(x).square()


def _check_gates(check: ArgumentCheck, x: torch.Tensor, gates: torch.Tensor, by_sigmoid: bool) -> None:
    check.tensor("x", x, "tokens groups numbers", dense=1)
    check.tensor("gates", gates, "tokens groups numbers", (x.dtype,), dense=1)


@operation(_check_gates, triton="elementwise.activation", native=ops.apply_gate, guards_itself=True)
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
