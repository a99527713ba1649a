"""Rotary position embedding in the half-split (GPT-NeoX) layout that Hugging Face checkpoints of the Llama family use.

Knows how to rotate; refuses to know frequencies: cos and sin arrive per token, so scaling rules stay in the engine's
layer.
"""

import torch

from kernels.device import triton_form

_triton = triton_form("rotary")


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim]; cos, sin [tokens, head_dim / 2] in fp32 -> rotated x, in x's dtype.

    Dimension i turns together with i + head_dim / 2. Products are taken in fp32: bf16 cosines cost three digits of the
    angle.
    """
    if x.is_cuda and _triton is not None:
        return _triton.rotary(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
