"""Gated activations of feed-forwards: one input holds gate and up side by side, as the fused matmul leaves them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.checks import FLOATS, Call, placed
from kernels.cpu import ops
from kernels.device import triton_form

_triton = triton_form("activation")


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> silu(gate) * up, [tokens, intermediate]."""
    native = ops.gated_activation(x, ops.SILU)
    if native is not None:
        return native
    _check("silu_and_mul", x)
    if x.is_cuda and _triton is not None:
        return _triton.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gelu(gate) * up by gelu's tanh approximation, [tokens, intermediate]."""
    native = ops.gated_activation(x, ops.GELU_TANH)
    if native is not None:
        return native
    _check("gelu_tanh_and_mul", x)
    if x.is_cuda and _triton is not None:
        return _triton.gelu_tanh_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gate * sigmoid(alpha * gate) * (up + 1), [tokens, intermediate]; the gate is
    clamped from above and up from both sides, before."""
    _check("clamped_swiglu", x)
    if x.is_cuda and _triton is not None:
        return _triton.clamped_swiglu(x, alpha, limit)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _check(operation: str, x: torch.Tensor) -> None:
    if not (
        x.dim() == 2 and x.dtype in FLOATS and x.shape[1] and not x.shape[1] & 1 and x.stride(1) == 1 and placed(x)
    ):
        call = Call(operation)
        call.tensor("x", x, "tokens columns", dense=1)
        call.require("x", x.shape[1] % 2 == 0, f"has {x.shape[1]} columns, wanted as many of the gate as of up")


# Those that the CPU library computes together with the product before them, and their numbers there.
FUSED: dict[Callable[[torch.Tensor], torch.Tensor], int] = {silu_and_mul: ops.SILU, gelu_tanh_and_mul: ops.GELU_TANH}
