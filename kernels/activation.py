"""Gated activations of feed-forwards: one input holds gate and up side by side, as the fused matmul leaves them."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> silu(gate) * up, [tokens, intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gelu(gate) * up by gelu's tanh approximation, [tokens, intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> gate * sigmoid(alpha * gate) * (up + 1), [tokens, intermediate]; the gate is
    clamped from above and up from both sides, before."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
