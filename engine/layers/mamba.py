"""Mamba-2 (arXiv 2405.21060), as in hybrid models.

A projection, a short convolution, the state space, a gate and a norm. Step sizes, decays and states are fp32, whatever the type of the weights.
"""

from typing import Self

import torch
import torch.nn.functional as F

from pilotlight.engine.description.recurrent_shapes import MambaShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.state_places import StatePlaces
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.short_conv import CausalConv
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.state.gated_norm import gate_then_norm
from pilotlight.kernels.state.ssd import ssd, ssd_step


class Mamba:
    def __init__(
        self,
        in_proj: Linear,
        conv: CausalConv,
        of_heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: torch.Tensor,
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
        return cls(
            Linear.load(loader, [f"{name}.in_proj"], [shape.projected], hidden_size, bias),
            CausalConv.load(
                loader, f"{name}.conv1d", shape.channels, shape.width, bias=shape.has_conv_bias, activation=F.silu
            ),
            (
                wide.tensor(f"{name}.A_log", shape.heads),
                wide.tensor(f"{name}.dt_bias", shape.heads),
                wide.tensor(f"{name}.D", shape.heads),
            ),
            loader.tensor(f"{name}.norm.weight", shape.inner),
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], shape.inner, bias),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        shape, cache = self.shape, context.caches[self.shape.layer]
        states, conv_state = cache.segments
        places = context.states[cache.group]
        gate, mixed, steps = torch.split(self.in_proj(x, context), [shape.inner, shape.channels, shape.heads], dim=1)
        mixed = self.conv(mixed, conv_state, places).float()
        inner, b, c = torch.split(mixed, [shape.inner, *(shape.groups * shape.state,) * 2], dim=1)
        inner = torch.unflatten(inner, 1, (shape.heads, shape.head_dim))
        b, c = (torch.unflatten(one, 1, (shape.groups, shape.state)) for one in (b, c))
        steps = F.softplus(steps.float() + self.step_bias)
        tokens = (inner * steps.unsqueeze(2), b, c, -self.decays.exp() * steps)
        outputs = self._mixed(tokens, states, places) + inner * self.skip.unsqueeze(1)
        grouped = (shape.groups, shape.inner // shape.groups)
        normed = gate_then_norm(
            outputs.reshape(-1, *grouped), torch.unflatten(gate, 1, grouped), self.norm.view(grouped), shape.eps
        )
        return self.out_proj(normed.flatten(1), context)

    def _mixed(self, tokens: tuple[torch.Tensor, ...], kept: torch.Tensor, places: StatePlaces) -> torch.Tensor:
        """Apply the state space to the tokens of the step, and update the states in `kept`.

        `tokens`: x, b, c and g of `ssd`; `kept` [blocks, 1, heads, state * head_dim]. Return [tokens, heads, head_dim] fp32.
        """
        shape, outputs = self.shape, []
        states = torch.unflatten(kept[:, 0], 2, (shape.state, shape.head_dim))
        if places.before is not None and places.after is not None:
            x, b, c, g = (one[: places.num_decoded] for one in tokens)
            output, state = ssd_step(x, b, c, g, states[places.before])
            states[places.after] = state
            outputs.append(output)
        for prompt in places.prompts:
            state = torch.zeros_like(states[0]) if prompt.before is None else states[prompt.before][0]
            left = []
            for run in prompt.runs:
                x, b, c, g = (one[run] for one in tokens)
                output, state = ssd(x, b, c, g, state)
                outputs.append(output)
                left.append(state)
            states[prompt.after] = torch.stack(left)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
