"""The feed-forward: gate, if there is one, and up in one matmul, then down."""

import torch

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
        parts = ["up_proj"] if activation is relu2 else ["gate_proj", "up_proj"]
        names = [f"{name}.{part}" for part in parts]
        gate_up = Linear.load(loader, names, [intermediate_size] * len(parts), hidden_size, bias, "rows")
        down = Linear.load(loader, [f"{name}.down_proj"], [hidden_size], intermediate_size, bias, "columns")
        return cls(gate_up, down, activation)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return context.summed(self.part(x, context))

    def part(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return this rank's part of the output, to be summed over ranks."""
        return self.down_proj(self.gate_up_proj.gated(x, self.activation, context), context)
