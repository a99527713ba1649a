"""The feed-forward: gate, if there is one, and up in one matmul, then down."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pilotlight.engine.description.tensor_sizes import XIELU_PARTS
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.activation import relu2, silu_and_mul
from pilotlight.kernels.matrices.weight import GatedActivation


def scaled_silu_and_mul(x: torch.Tensor, gate_scale: float, scale: float) -> torch.Tensor:
    """Return scale * silu(gate_scale * gate) * up, [tokens, intermediate].

    x [tokens, 2 * intermediate]: gates, then ups.
    """
    gate, up = x.chunk(2, dim=1)
    return silu_and_mul(torch.cat((gate * gate_scale, up * scale), dim=1))


class Xielu:
    """The activation xIELU (arXiv 2411.13010), with learned parameters and without a gate."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: the parameters, fp32, in the order of XIELU_PARTS, the first two before their softplus."""
        self._parts = parts

    @classmethod
    def load(cls, loader: WeightLoader, name: str) -> "Xielu":
        wide = loader.with_dtype(torch.float32)
        parts = {f"{name}.{part}": (wide.empty(f"{name}.{part}", 1), shape) for part, shape in XIELU_PARTS.items()}
        for stored, (into, shape) in parts.items():
            wide.read(stored, into, shape, lambda number: number)
        return cls([into for into, _ in parts.values()])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, columns] for x [tokens, columns]."""
        alpha_p, alpha_n, beta, eps = self._parts
        wide = x.float()
        above = F.softplus(alpha_p) * wide.square()
        below = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(wide, eps)) - wide)
        return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


class GatedMLP:
    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: GatedActivation = silu_and_mul) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: GatedActivation = silu_and_mul,
    ) -> "GatedMLP":
        has_gate = activation is not relu2 and not isinstance(activation, Xielu)
        parts = ["gate_proj", "up_proj"] if has_gate else ["up_proj"]
        names = [f"{name}.{part}" for part in parts]
        gate_up = Linear.load(loader, names, [intermediate_size] * len(parts), hidden_size, bias, "rows")
        down = Linear.load(loader, [f"{name}.down_proj"], [hidden_size], intermediate_size, bias, "columns")
        return cls(gate_up, down, activation)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return context.summed(self.part(x, context))

    def part(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return this rank's part of the output, to be summed over ranks."""
        return self.down_proj(self.gate_up_proj.gated(x, self.activation, context), context)
