"""The norm and the gate of a recurrent layer's output; a program has one row in registers."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import LONGEST_ROW, check_launch, warps_for


@jit
def _gated_norm(
    x, gate, weight, y, gate_token, weight_row, groups, columns, eps, GATES_FIRST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    row = (token * groups + group) * columns + column
    stored = tl.load(x + row, mask=inside, other=0.0)
    number = stored.to(tl.float32)
    gates = tl.load(gate + token * gate_token + group * columns + column, mask=inside, other=0.0).to(tl.float32)
    gates *= tl.sigmoid(gates)
    if GATES_FIRST:
        number *= gates
    factor = tl.load(weight + group * weight_row + column, mask=inside, other=0.0).to(tl.float32)
    number *= tl.rsqrt(tl.sum(number * number, axis=0) / columns + eps) * factor
    if not GATES_FIRST:
        number *= gates
    tl.store(y + row, number.to(stored.dtype), mask=inside)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> torch.Tensor:
    """Compute gated_norm of kernels/state/gated_norm.py."""
    tokens, groups, columns = x.shape
    check_launch("gated_norm", "x", groups, "groups")
    check_launch("gated_norm", "x", columns, "columns", LONGEST_ROW)
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    if y.numel():
        _gated_norm[(tokens, groups)](
            x, gate, weight, y, gate.stride(0), columns if weight.shape[0] > 1 else 0, groups, columns, eps,
            GATES_FIRST=gates_first, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return y
