"""The gated feed-forward of the Llama family: gate and up in one matmul, then down."""

import torch

from engine.layers.linear import Linear
from engine.layers.weights import WeightLoader
from kernels.activation import silu_and_mul


class GatedMLP:
    def __init__(self, gate_up_proj: Linear, down_proj: Linear) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, intermediate_size: int, bias: bool) -> "GatedMLP":
        gate_up = Linear.load(
            loader, [f"{name}.gate_proj", f"{name}.up_proj"], [intermediate_size] * 2, hidden_size, bias
        )
        return cls(gate_up, Linear.load(loader, [f"{name}.down_proj"], [hidden_size], intermediate_size, bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))
