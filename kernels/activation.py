"""The gated activation of a Llama feed-forward: one input holds gate and up side by side, as the fused matmul leaves
them."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * intermediate] -> silu(gate) * up, [tokens, intermediate]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
