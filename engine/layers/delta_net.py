"""Gated DeltaNet, as in Qwen3-Next and Qwen3.5.

Projections, a short convolution, the gated delta rule, a norm and a gate. Decays, step sizes and states are fp32, whatever the type of the weights.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from pilotlight.engine.description.recurrent_shapes import DeltaShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.state_places import StatePlaces
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.short_conv import CausalConv
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.state.delta_rule import gated_delta_rule, gated_delta_step
from pilotlight.kernels.state.gated_norm import norm_then_gate

_EPS = 1e-6  # of the L2 norms of queries and keys; config.json's epsilon is for other norms


class _Inputs(NamedTuple):
    """Inputs of the gated delta rule, all fp32."""

    q: torch.Tensor  # [tokens, value_heads, key_dim]
    k: torch.Tensor
    v: torch.Tensor  # [tokens, value_heads, value_dim]
    g: torch.Tensor  # [tokens, value_heads]: logs of decays
    b: torch.Tensor  # [tokens, value_heads]: step sizes

    def of(self, tokens: slice) -> "_Inputs":
        return _Inputs(*[x[tokens] for x in self])


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
            CausalConv.load(loader, f"{name}.conv1d", shape.channels, shape.width, activation=F.silu),
            wide.tensor(f"{name}.A_log", shape.value_heads),
            wide.tensor(f"{name}.dt_bias", shape.value_heads),
            loader.tensor(f"{name}.norm.weight", shape.value_dim),
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], shape.value_size, bias=False),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        cache = context.caches[self.shape.layer]
        states, conv_state = cache.segments
        places = context.states[cache.group]
        qkv, gate, steps, decays = self._projected(x, context)
        inputs = self._inputs(self.conv(qkv, conv_state, places), steps, decays)
        mixed = self._mixed(inputs, states, places)
        normed = norm_then_gate(mixed, gate, self.norm, self.shape.eps)
        return self.out_proj(normed.flatten(1), context)

    def _projected(
        self, x: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project x to queries, keys and values, gates, steps and decays; `_inputs` activates the last two.

        x [tokens, hidden] -> [tokens, channels], [tokens, value_heads, value_dim], [tokens, value_heads], [tokens, value_heads]
        """
        shape = self.shape
        if not shape.is_grouped:
            qkv, gate, steps, decays = [project(x, context) for project in self.projections]
            return qkv, torch.unflatten(gate, 1, (shape.value_heads, shape.value_dim)), steps, decays
        both, two = (torch.unflatten(project(x, context), 1, (shape.key_heads, -1)) for project in self.projections)
        of_key = shape.value_heads // shape.key_heads
        q, k, v, gate = torch.split(both, [shape.key_dim, shape.key_dim, *(of_key * shape.value_dim,) * 2], dim=2)
        steps, decays = torch.split(two, of_key, dim=2)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return qkv, gate.reshape(len(x), shape.value_heads, shape.value_dim), steps.flatten(1), decays.flatten(1)

    def _inputs(self, qkv: torch.Tensor, steps: torch.Tensor, decays: torch.Tensor) -> _Inputs:
        shape = self.shape
        q, k, v = torch.split(qkv.float(), [shape.key_size, shape.key_size, shape.value_size], dim=1)
        q, k = (_unit(torch.unflatten(x, 1, (shape.key_heads, shape.key_dim))) for x in (q, k))
        of_key = shape.value_heads // shape.key_heads
        return _Inputs(
            (q * shape.key_dim**-0.5).repeat_interleave(of_key, 1),
            k.repeat_interleave(of_key, 1),
            torch.unflatten(v, 1, (shape.value_heads, shape.value_dim)),
            -self.decays.exp() * F.softplus(decays.float() + self.decay_bias),
            steps.float().sigmoid(),
        )

    def _mixed(self, inputs: _Inputs, kept: torch.Tensor, places: StatePlaces) -> torch.Tensor:
        """Apply the gated delta rule to the tokens of the step, and update the states in `kept`.

        `kept` [blocks, 1, value_heads, key_dim * value_dim]. Return [tokens, value_heads, value_dim] fp32.
        """
        shape, outputs = self.shape, []
        states = torch.unflatten(kept[:, 0], 2, (shape.key_dim, shape.value_dim))
        if places.before is not None and places.after is not None:
            output, state = gated_delta_step(*inputs.of(slice(places.num_decoded)), states[places.before])
            states[places.after] = state
            outputs.append(output)
        for prompt in places.prompts:
            state = torch.zeros_like(states[0]) if prompt.before is None else states[prompt.before][0]
            left = []
            for run in prompt.runs:
                output, state = gated_delta_rule(*inputs.of(run), state)
                outputs.append(output)
                left.append(state)
            states[prompt.after] = torch.stack(left)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale each head of x [tokens, heads, numbers] to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()
