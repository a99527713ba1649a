"""Gated activations of feed-forwards: one input holds gate and up side by side, as the fused matmul leaves them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, ArgumentCheck, placed
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


def _check(operation: str, x: torch.Tensor, *_: float) -> None:
    if not (x.ndim == 2 and x.dtype in FLOATS and x.shape[1] and not x.shape[1] & 1 and x.stride(1) == 1 and placed(x)):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens columns", dense=1)
        check.require("x", x.shape[1] % 2 == 0, f"has {x.shape[1]} columns, wanted as many of the gate as of up")


@operation(_check, triton="elementwise.activation", native=partial(ops.gated_activation, activation=ops.SILU))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> silu(gate) * up, [tokens, intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@operation(_check, triton="elementwise.activation", native=partial(ops.gated_activation, activation=ops.GELU_TANH))
def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gelu(gate) * up by gelu's tanh approximation, [tokens, intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@operation(_check, triton="elementwise.activation")
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gate * sigmoid(alpha * gate) * (up + 1), [tokens, intermediate]; the gate is
    clamped from above and up from both sides, before."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


# Those that the C library computes together with the product before them, and their numbers there.
FUSED: dict[Callable[[torch.Tensor], torch.Tensor], int] = {silu_and_mul: ops.SILU, gelu_tanh_and_mul: ops.GELU_TANH}
