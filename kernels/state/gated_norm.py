"""The RMS norm and the gate of a recurrent layer's output, in either order."""

from typing import Any

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, ArgumentCheck, placed
from pilotlight.kernels.cpu import state_ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation


def _check(
    operation: str, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> None:
    if not (
        x.ndim == 3
        and x.dtype in FLOATS
        and gate.dtype == weight.dtype == x.dtype
        and gate.shape == x.shape
        and x.shape[2] > 0
        and x.is_contiguous()
        and (x.shape[0] == 0 or gate[0].is_contiguous())
        and weight.ndim == 2
        and weight.shape[0] in (1, x.shape[1])
        and weight.shape[1] == x.shape[2]
        and weight.is_contiguous()
        and placed(x, gate, weight)
    ):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens groups numbers", dense=3)
        check.tensor("gate", gate, "tokens groups numbers", (x.dtype,), dense=2)
        check.require("x", x.shape[2] > 0, f"has shape {list(x.shape)}: a row without values has no mean")
        check.tensor("weight", weight, "_ numbers", (x.dtype,), dense=2)
        rows = weight.shape[0]
        check.require("weight", rows in (1, x.shape[1]), f"has {rows} rows, wanted 1 or one of each group")


def _native(library: Library, *args: Any) -> torch.Tensor | None:
    _check("gated_norm", *args)
    return state_ops.gated_norm(library, *args)


@operation(_check, triton="state.gated_norm", native=_native)
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
