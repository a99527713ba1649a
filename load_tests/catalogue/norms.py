"""The catalogue's entries of root-mean-square norms."""

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.elementwise import norm

_EPS = 1e-5
_BANDWIDTH = Target(0.85, "copy")


def _rows(tokens: int, hidden: int, *, adds: bool, gap: int = 0) -> Case:
    """Make a case. `gap`: padding columns between two rows of x."""

    def make(dtype: torch.dtype) -> Arguments:
        made: Arguments = {"x": torch.randn(tokens, hidden + gap).to(dtype)[:, :hidden]}
        if adds:
            made["residual"] = torch.randn(tokens, hidden).to(dtype)
        return made | {"weight": torch.randn(hidden).to(dtype), "eps": _EPS}

    return Case(f"{tokens} x {hidden}" + (" strided" if gap else ""), make, _BANDWIDTH)


def _heads(tokens: int, heads: int, head_dim: int) -> Case:
    """Make a case of some heads of a projection; in memory the other heads are between two tokens."""

    def make(dtype: torch.dtype) -> Arguments:
        projected = torch.randn(tokens, heads + 2, head_dim).to(dtype)
        return {"x": projected[:, :heads], "weight": torch.randn(heads, head_dim).to(dtype), "eps": _EPS}

    return Case(f"{tokens} x {heads} x {head_dim}", make, _BANDWIDTH)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normed(x + residual, weight, eps), x + residual


def _cost(arguments: Arguments) -> Cost:
    """Count every operand once, and a result for each of x and residual."""
    x, residual = arguments["x"], arguments.get("residual")
    return Cost(2 * size(x, residual) + size(arguments["weight"]))


_SIZES = ((0, 8), (1, 1), (3, 64), (5, 431))
_MODELS = ((64, 4096), (2048, 4096), (8192, 7168))

# Tolerance: in the storage type, the rounding of the result; in fp32, a few more in the sum of squares.
RMS_NORM = Operation(
    name="rms_norm",
    function=norm.rms_norm,
    reference=_normed,
    roundings=3,
    cases=tuple(_rows(*shape, adds=False, gap=gap) for shape in _SIZES for gap in (0, 3)),
    bench=tuple(_rows(*shape, adds=False) for shape in _MODELS),
    cost=_cost,
    rows=("x",),
    rivals={"torch": lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)},
)
# Tolerance: one more rounding, because the sum is rounded before it is normalised.
ADD_RMS_NORM = Operation(
    name="add_rms_norm",
    function=norm.add_rms_norm,
    reference=_add_normed,
    roundings=4,
    cases=tuple(_rows(*shape, adds=True, gap=gap) for shape in _SIZES for gap in (0, 3)),
    bench=tuple(_rows(*shape, adds=True) for shape in _MODELS),
    cost=_cost,
    rows=("x", "residual"),
)
HEAD_RMS_NORM = Operation(
    name="head_rms_norm",
    function=norm.head_rms_norm,
    reference=_normed,
    roundings=4,
    cases=(_heads(4, 3, 10), _heads(1, 1, 1), _heads(0, 2, 8), _heads(3, 6, 128)),
    bench=(_heads(2048, 40, 128),),
    cost=_cost,
    rows=("x",),
)
OPERATIONS = (RMS_NORM, ADD_RMS_NORM, HEAD_RMS_NORM)
