"""The RMS norm and the gate of a recurrent layer's output, in either order."""

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import state_ops
from pilotlight.kernels.dispatch import operation


def _check(
    check: ArgumentCheck, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> None:
    check.tensor("x", x, "tokens groups numbers", dense=3)
    check.tensor("gate", gate, "tokens groups numbers", (x.dtype,), dense=2)
    check.require("x", x.shape[2] > 0, f"has shape {list(x.shape)}: a row without values has no mean")
    check.tensor("weight", weight, "_ numbers", (x.dtype,), dense=2)
    rows = weight.shape[0]
    check.require("weight", rows in (1, x.shape[1]), f"has {rows} rows, wanted 1 or one of each group")


@operation(_check, triton="state.gated_norm", native=state_ops.gated_norm)
def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> torch.Tensor:
    """Return weight * norm(x) * silu(gate), or weight * norm(x * silu(gate)) if `gates_first`.

    x, gate [tokens, groups, numbers], each group with a separate norm; weight [groups, numbers], or [1, numbers] for all groups. The gate may be
    strided between tokens. Computation is in fp32.
    """
    wide, opened = x.float(), F.silu(gate.float())
    y = F.rms_norm(wide * opened if gates_first else wide, x.shape[2:], None, eps) * weight.float()
    return (y if gates_first else y * opened).to(x.dtype)
