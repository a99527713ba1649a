"""Root-mean-square normalisation, alone and fused with the residual addition before it.

Knows one row at a time; refuses to know which layer it serves. Statistics are taken in fp32 whatever the storage type.
"""

import torch
import torch.nn.functional as F

from kernels.checks import FLOATS, Call, placed
from kernels.cpu import ops
from kernels.device import triton_form

_triton = triton_form("norm")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [tokens, hidden], weight [hidden] -> [tokens, hidden] in x's dtype."""
    native = ops.rms_norm(x, None, weight, eps)
    if native is not None:
        return native[0]
    _check("rms_norm", x, None, weight)
    if x.is_cuda and _triton is not None:
        return _triton.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x, then normalise: returns (normalised, new residual). The sum is rounded to the storage type first,
    as every unfused implementation does, so that fusing changes no bit of the residual stream."""
    native = ops.rms_norm(x, residual, weight, eps)
    if native is not None:
        return native
    _check("add_rms_norm", x, residual, weight)
    if x.is_cuda and _triton is not None:
        return _triton.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return _rms_norm(residual, weight, eps), residual


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [tokens, heads, head_dim], strided or not; weight [heads, head_dim] -> the same shape as x, each head
    normalised for itself."""
    _check("head_rms_norm", x, None, weight)
    if x.is_cuda and _triton is not None:
        return _triton.head_rms_norm(x, weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight).to(x.dtype)


def _check(operation: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    dtype = x.dtype
    if not (
        dtype in FLOATS
        and x.ndim == (3 if operation == "head_rms_norm" else 2)
        and x.shape[1:] == weight.shape
        and weight.numel()
        and x.stride()[-1] == 1
        and weight.is_contiguous()
        and (weight.dtype == dtype or weight.dtype == torch.float32)
        and (residual is None or (residual.dtype == dtype and residual.shape == x.shape and residual.is_contiguous()))
        and placed(x, residual, weight)
    ):
        _look_at(operation, x, residual, weight)


def _look_at(operation: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    call = Call(operation)
    row = "heads head_dim" if operation == "head_rms_norm" else "hidden"
    call.tensor("x", x, f"tokens {row}", dense=1)
    if residual is not None:
        call.tensor("residual", residual, f"tokens {row}", (x.dtype,), dense=1)
    call.tensor("weight", weight, row, (x.dtype, torch.float32), dense=weight.dim())
    call.require("x", x.shape[-1] > 0, f"has shape {list(x.shape)}: a row without values has no mean")
