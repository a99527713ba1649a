"""Root-mean-square normalisation; a program has its row in registers, read once and written once."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import LONGEST_ROW, check_launch, warps_for


@jit
def _rms_norm(
    x, residual, weight, out, new_residual,
    x_token, x_head, residual_token, out_token, out_head, new_residual_token,
    columns, eps,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0)
    if ADDS:
        # the sum is rounded to the storage type before it is normalised, as in kernels/elementwise/norm.py
        row = (
            row.to(tl.float32)
            + tl.load(residual + token * residual_token + column, mask=inside, other=0.0).to(tl.float32)
        ).to(row.dtype)
        tl.store(new_residual + token * new_residual_token + column, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    factor = tl.load(weight + head * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_token + head * out_head + column, (wide * scale * factor).to(row.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [tokens, hidden] normalised and multiplied by weight [hidden]."""
    check_launch("rms_norm", "x", x.shape[1], "columns", LONGEST_ROW)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if tokens:
        _rms_norm[(tokens, 1)](
            x, x, weight, out, out, x.stride(0), 0, 0, out.stride(0), 0, 0, hidden, eps,
            ADDS=False, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised, x + residual), both new tensors."""
    check_launch("add_rms_norm", "x", x.shape[1], "columns", LONGEST_ROW)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = torch.empty_like(out)
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if tokens:
        _rms_norm[(tokens, 1)](
            x, residual, weight, out, summed,
            x.stride(0), 0, residual.stride(0), out.stride(0), 0, summed.stride(0), hidden, eps,
            ADDS=True, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out, summed


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head of x [tokens, heads, head_dim], which may be strided; weight [heads, head_dim]."""
    check_launch("head_rms_norm", "x", x.shape[1], "heads")
    check_launch("head_rms_norm", "x", x.shape[2], "columns", LONGEST_ROW)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    block = triton.next_power_of_2(head_dim)
    if tokens:
        _rms_norm[(tokens, heads)](
            x, x, weight, out, out, x.stride(0), x.stride(1), 0, out.stride(0), out.stride(1), 0, head_dim, eps,
            ADDS=False, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out
