"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split or interleaved.

The half-split layout (GPT-NeoX) is that of Hugging Face checkpoints of the Llama family; in the interleaved one of DeepSeek-V3 and Llama 4 the values
of a pair are adjacent. This module gets cos and sin of each token, so rules that scale frequencies stay in the engine.
"""

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation


def _check(check: ArgumentCheck, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _: bool = False) -> None:
    check.tensor("x", x, "tokens heads head_dim")
    require_pairs(check, "x", x)
    check.derive("head_dim/2", x.shape[2] // 2, "x")
    for name, values in (("cos", cos), ("sin", sin)):
        check.tensor(name, values, "tokens head_dim/2", (torch.float32,))


def require_pairs(check: ArgumentCheck, name: str, x: torch.Tensor) -> None:
    size = x.shape[2]
    check.require(
        name, size % 2 == 0, f"has heads of {size} values; wanted an even number, because they are rotated in pairs"
    )


@operation(_check, triton="elementwise.rotary")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """Return x rotated, in x's dtype. x [tokens, heads, head_dim]; cos, sin [tokens, head_dim / 2] fp32.

    Dimension i is paired with i + head_dim / 2 or, interleaved, 2i with 2i + 1; in both cases the first half of the result has the first value of
    each pair. This order does not change the product of a query and a key. Products are computed in fp32, because cosines in bf16 lose three digits
    of the angle.
    """
    return turned(x, cos, sin, is_interleaved)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """Compute `rotary` with torch, for checked arguments."""
    half = x.shape[2] >> 1
    first, second = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
