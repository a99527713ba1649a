"""Gated activations of feed-forwards: one input holds gate and up side by side, as the fused matmul leaves them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.cpu import ops
from kernels.device import triton_form

_triton = triton_form("activation")


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> silu(gate) * up, [tokens, intermediate]."""
    if x.is_cuda and _triton is not None:
        return _triton.silu_and_mul(x)
    native = ops.gated_activation(x, ops.SILU)
    if native is not None:
        return native
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gelu(gate) * up by gelu's tanh approximation, [tokens, intermediate]."""
    if x.is_cuda and _triton is not None:
        return _triton.gelu_tanh_and_mul(x)
    native = ops.gated_activation(x, ops.GELU_TANH)
    if native is not None:
        return native
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gate * sigmoid(alpha * gate) * (up + 1), [tokens, intermediate]; the gate is
    clamped from above and up from both sides, before."""
    if x.is_cuda and _triton is not None:
        return _triton.clamped_swiglu(x, alpha, limit)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


# Those that the CPU library computes together with the product before them, and their numbers there.
FUSED: dict[Callable[[torch.Tensor], torch.Tensor], int] = {silu_and_mul: ops.SILU, gelu_tanh_and_mul: ops.GELU_TANH}
