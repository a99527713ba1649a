"""The RMS norm and the gate of a recurrent layer's output, in either order."""

import torch
import torch.nn.functional as F


def norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * norm(x) * silu(gate), in the gate's type.

    x [tokens, heads, numbers] fp32; gate of the same shape and any type; weight [numbers].
    """
    normed = F.rms_norm(x, x.shape[-1:], None, eps)
    return (normed * weight.float() * F.silu(gate.float())).to(gate.dtype)


def gate_then_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * norm(x * silu(gate)), with a norm of each group, in the gate's type.

    x, gate [tokens, groups, numbers]; weight [groups, numbers].
    """
    gated = x.float() * F.silu(gate.float())
    return (F.rms_norm(gated, x.shape[-1:], None, eps) * weight.float()).to(gate.dtype)
