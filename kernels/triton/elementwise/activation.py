"""Activations, computed in fp32 and rounded once."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch

SILU, GELU_TANH, CLAMPED_SWIGLU, RELU2 = 0, 1, 2, 3


@jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr):
    if KIND == 0:
        value = gate * tl.sigmoid(gate) * up
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        value = gate * tl.sigmoid(2.0 * inner) * up  # 0.5 * (1 + tanh(y)) = sigmoid(2 y)
    elif KIND == 3:
        value = tl.maximum(gate, 0.0) * up  # without a gate, both are the same values
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = gate * tl.sigmoid(gate * alpha) * (up + 1.0)
    return value


@jit
def _gated(x, out, x_token, columns, up_start, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    stored = tl.load(x + token * x_token + column, mask=inside, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(x + token * x_token + up_start + column, mask=inside, other=0.0).to(tl.float32)
    value = activated(gate, up, alpha, limit, KIND)
    tl.store(out + token * columns + column, value.to(stored.dtype), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Apply the activation to x [tokens, 2 * intermediate]; return [tokens, intermediate]."""
    return _run(x, SILU)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _run(x, GELU_TANH)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _run(x, CLAMPED_SWIGLU, alpha, limit)


def relu2(x: torch.Tensor) -> torch.Tensor:
    return _run(x, RELU2)


def _run(x: torch.Tensor, kind: int, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    tokens, columns = x.shape[0], x.shape[1] if kind == RELU2 else x.shape[1] // 2
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(max(1, columns)))
    check_launch("gated activation", "x", triton.cdiv(columns, block), f"pieces of {block} columns")
    if out.numel():
        grid = (tokens, triton.cdiv(columns, block))
        _gated[grid](
            x, out, x.stride(0), columns, 0 if kind == RELU2 else columns, alpha, limit, KIND=kind, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@jit
def _apply_gate(
    x, gates, y, x_token, x_group, gates_token, gates_group, groups, size, BY_SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):
    token, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    stored = tl.load(x + token * x_token + group * x_group + number, mask=inside, other=0.0)
    gate = tl.load(gates + token * gates_token + group * gates_group + number, mask=inside, other=0.0).to(tl.float32)
    if BY_SIGMOID:
        gate = tl.sigmoid(gate)
    value = stored.to(tl.float32) * gate
    tl.store(y + (token * groups + group) * size + number, value.to(stored.dtype), mask=inside)


def apply_gate(x: torch.Tensor, gates: torch.Tensor, by_sigmoid: bool) -> torch.Tensor:
    """Compute apply_gate of kernels/elementwise/activation.py."""
    tokens, groups, size = x.shape
    y = torch.empty((tokens, groups, size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(max(1, size)))
    check_launch("apply_gate", "x", triton.cdiv(size, block), f"pieces of {block} numbers")
    if y.numel():
        _apply_gate[(tokens * groups, triton.cdiv(size, block))](
            x, gates, y, *x.stride()[:2], *gates.stride()[:2], groups, size, BY_SIGMOID=by_sigmoid, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return y
