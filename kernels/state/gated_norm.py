"""A root-mean-square norm between what a state gives and its gate, in either order."""

import torch
import torch.nn.functional as F


def norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [tokens, heads, numbers] fp32, gate alike in any type; weight [numbers] -> weight * norm(x) * silu(gate), in the gate's type"""
    normed = F.rms_norm(x, x.shape[-1:], None, eps)
    return (normed * weight.float() * F.silu(gate.float())).to(gate.dtype)


def gate_then_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [tokens, groups, numbers]; weight [groups, numbers] -> weight * norm(x * silu(gate)), each group for itself, in the gate's type"""
    gated = x.float() * F.silu(gate.float())
    return (F.rms_norm(gated, x.shape[-1:], None, eps) * weight.float()).to(gate.dtype)
