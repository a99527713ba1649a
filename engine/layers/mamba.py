"""Mamba-2 (arXiv 2405.21060), as in hybrid models.

Its parts are a projection, a short convolution, the state space, a gate and a norm. Step sizes, decays and states are fp32, whatever the type of the
weights.
"""

from typing import Self

import torch
import torch.nn.functional as F

from pilotlight.engine.description.recurrent_shapes import MambaShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.short_conv import CausalConv
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.state.gated_norm import gated_norm
from pilotlight.kernels.state.ssd import ssd


class Mamba:
    def __init__(
        self,
        in_proj: Linear,
        conv: CausalConv,
        of_heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: torch.Tensor | None,
        out_proj: Linear,
        shape: MambaShape,
    ) -> None:
        """`of_heads`: A_log, dt_bias and D, each [heads] fp32."""
        self.in_proj = in_proj
        self.conv = conv
        self.decays, self.step_bias, self.skip = of_heads
        self.norm = norm
        self.out_proj = out_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, layer_name: str, hidden_size: int, shape: MambaShape) -> Self:
        name, wide, bias = f"{layer_name}.{shape.name}", loader.with_dtype(torch.float32), shape.is_biased
        own, inner, group = shape.part_of(loader.shard.size), (shape.inner, shape.head_dim), shape.groups * shape.state
        channels = [inner, (group, shape.state), (group, shape.state)]

        def of_heads(part: str) -> torch.Tensor:
            return wide.rows([f"{name}.{part}"], [shape.heads], split="rows")

        return cls(
            Linear.load_runs(loader, f"{name}.in_proj", [inner, *channels, (shape.heads, 1)], hidden_size, bias),
            CausalConv.load(
                loader, [f"{name}.conv1d"], channels, shape.width, bias=shape.has_conv_bias, activates=True
            ),
            (of_heads("A_log"), of_heads("dt_bias"), of_heads("D")),
            loader.rows([f"{name}.norm.weight"], [shape.inner], split="rows", unit=shape.head_dim)
            if shape.has_norm
            else None,
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], shape.inner, bias, "columns", shape.head_dim),
            own,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        shape, cache = self.shape, context.caches[self.shape.layer]
        states, conv_state = cache.segments
        batch = context.states_of(cache)
        gate, mixed, steps = self._projected(x, context)
        mixed = self.conv(mixed, conv_state, batch)
        states = torch.unflatten(states[:, 0], 2, (shape.state, shape.head_dim))  # [blocks, heads, state, head_dim]
        outputs = ssd(mixed, steps, self.decays, self.step_bias, self.skip, shape.groups, states, batch)
        return context.summed(self.out_proj(self._gated(outputs.flatten(1), gate, context), context))

    def _projected(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project x [tokens, hidden].

        Returns gates [tokens, inner], inputs with B and C [tokens, channels], and steps [tokens, heads].
        """
        shape, projected = self.shape, self.in_proj(x, context)
        if shape.scales:
            group = shape.groups * shape.state
            parts = torch.split(projected, [shape.inner, shape.inner, group, group, shape.heads], dim=1)
            projected = torch.cat([part * scale for part, scale in zip(parts, shape.scales, strict=True)], dim=1)
        gate, mixed, steps = torch.split(projected, [shape.inner, shape.channels, shape.heads], dim=1)
        return gate, mixed, steps

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor, context: Context) -> torch.Tensor:
        """Normalise the outputs, if the layer has a norm, and apply the gates; all [tokens, inner]."""
        if self.norm is None:
            return (outputs.float() * F.silu(gate.float())).to(outputs.dtype)
        shape = self.shape
        if context.ranks is not None and shape.is_norm_shared:
            opened, size = outputs.float() * F.silu(gate.float()), shape.inner * context.ranks.shard.size
            squares = context.summed(opened.square().sum(1, keepdim=True))
            return (opened * (squares / size + shape.eps).rsqrt() * self.norm.float()).to(outputs.dtype)
        x, gate, weight = (torch.unflatten(one, -1, (shape.groups, -1)) for one in (outputs, gate, self.norm))
        return gated_norm(x, gate, weight, shape.eps, shape.gates_first).flatten(1)
