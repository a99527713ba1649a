"""Root-mean-square normalisation, alone or fused with a preceding residual addition.

Each row is normalised independently of other rows. Statistics are computed in fp32 for every storage type.
"""

from functools import partial

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


def _check(check: ArgumentCheck, x: torch.Tensor, weight: torch.Tensor, eps: float, row: str = "hidden") -> None:
    check.tensor("x", x, f"tokens {row}", dense=1)
    check.tensor("weight", weight, row, (x.dtype, torch.float32), dense=weight.dim())
    check.require("x", x.shape[-1] > 0, f"has shape {list(x.shape)}: a row without values has no mean")


def _check_sum(check: ArgumentCheck, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _check(check, x, weight, eps)
    check.tensor("residual", residual, "tokens hidden", (x.dtype,), dense=1)


@operation(_check, triton="elementwise.norm", native=ops.rms_norm, guards_itself=True)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [tokens, hidden] normalised and multiplied by weight [hidden], in x's dtype."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight).to(x.dtype)


@operation(_check_sum, triton="elementwise.norm", native=ops.add_rms_norm, guards_itself=True)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual and normalise; return (normalised, new residual).

    The sum is rounded to the storage type before it is normalised, so the residual stream has the same bits as without fusion.
    """
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


@operation(partial(_check, row="heads head_dim"), triton="elementwise.norm")
def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head of x [tokens, heads, head_dim]; return the same shape.

    x may be strided; weight [heads, head_dim].
    """
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)
