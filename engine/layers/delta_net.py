"""Gated DeltaNet, as in Qwen3-Next and Qwen3.5.

Its parts are projections, a short convolution, the gated delta rule, a norm and a gate. Decays, step sizes and states are fp32, whatever the type of
the weights.
"""

from typing import Self

import torch

from pilotlight.engine.description.recurrent_shapes import DeltaShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.short_conv import CausalConv
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.state.delta_rule import gated_delta_rule
from pilotlight.kernels.state.gated_norm import gated_norm


class GatedDeltaNet:
    def __init__(
        self,
        projections: list[Linear],
        conv: CausalConv,
        decays: torch.Tensor,
        decay_bias: torch.Tensor,
        norm: torch.Tensor,
        out_proj: Linear,
        shape: DeltaShape,
    ) -> None:
        """`decays`, `decay_bias` [value_heads] fp32: A_log and dt_bias."""
        self.projections = projections
        self.conv = conv
        self.decays = decays
        self.decay_bias = decay_bias
        self.norm = norm
        self.out_proj = out_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, layer_name: str, hidden_size: int, shape: DeltaShape) -> Self:
        name, wide = f"{layer_name}.{shape.name}", loader.with_dtype(torch.float32)
        return cls(
            [
                Linear.load(loader, [f"{name}.{part}"], [rows], hidden_size, bias=False)
                for part, rows in shape.projections.items()
            ],
            CausalConv.load(loader, f"{name}.conv1d", shape.channels, shape.width, activates=True),
            wide.tensor(f"{name}.A_log", shape.value_heads),
            wide.tensor(f"{name}.dt_bias", shape.value_heads),
            loader.tensor(f"{name}.norm.weight", shape.value_dim),
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], shape.value_size, bias=False),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        shape, cache = self.shape, context.caches[self.shape.layer]
        states, conv_state = cache.segments
        batch = context.states[cache.group]
        qkv, gate, steps, decays = self._projected(x, context)
        qkv = self.conv(qkv, conv_state, batch)
        states = torch.unflatten(states[:, 0], 2, (shape.key_dim, shape.value_dim))  # [blocks, value_heads, ...]
        mixed = gated_delta_rule(qkv, steps, decays, self.decays, self.decay_bias, shape.key_heads, states, batch)
        normed = gated_norm(mixed, gate, self.norm.unsqueeze(0), shape.eps, False)
        return self.out_proj(normed.flatten(1), context)

    def _projected(
        self, x: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project x to queries, keys and values, gates, steps and decays, the last two without activation.

        x [tokens, hidden] -> [tokens, channels], [tokens, value_heads, value_dim], [tokens, value_heads], [tokens, value_heads]
        """
        shape = self.shape
        if not shape.is_grouped:
            qkv, gate, steps, decays = [project(x, context) for project in self.projections]
            return qkv, torch.unflatten(gate, 1, (shape.value_heads, shape.value_dim)), steps, decays
        both, two = (torch.unflatten(project(x, context), 1, (shape.key_heads, -1)) for project in self.projections)
        of_key = shape.value_heads // shape.key_heads
        q, k, v, gate = torch.split(both, [shape.key_dim, shape.key_dim, *(of_key * shape.value_dim,) * 2], dim=2)
        steps, decays = (x.flatten(1).contiguous() for x in torch.split(two, of_key, dim=2))
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return qkv, gate.reshape(len(x), shape.value_heads, shape.value_dim).contiguous(), steps, decays
