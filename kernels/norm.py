"""Root-mean-square normalisation, alone and fused with the residual addition before it.

Knows one row at a time; refuses to know which layer it serves. Statistics are taken in fp32 whatever the storage type.
"""

import torch
import torch.nn.functional as F

from kernels.cpu import ops
from kernels.device import triton_form

_triton = triton_form("norm")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [tokens, hidden], weight [hidden] -> [tokens, hidden] in x's dtype."""
    if x.is_cuda and _triton is not None:
        return _triton.rms_norm(x, weight, eps)
    native = ops.rms_norm(x, None, weight, eps)
    return _rms_norm(x, weight, eps) if native is None else native[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x, then normalise: returns (normalised, new residual). The sum is rounded to the storage type first,
    as every unfused implementation does, so that fusing changes no bit of the residual stream."""
    if x.is_cuda and _triton is not None:
        return _triton.add_rms_norm(x, residual, weight, eps)
    native = ops.rms_norm(x, residual, weight, eps)
    if native is not None:
        return native
    residual = x + residual
    return _rms_norm(residual, weight, eps), residual


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [tokens, heads, head_dim], strided or not; weight [heads, head_dim] -> the same shape as x, each head
    normalised for itself."""
    if x.is_cuda and _triton is not None:
        return _triton.head_rms_norm(x, weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight).to(x.dtype)
