"""Gated DeltaNet, as in Qwen3-Next and Qwen3.5, and Kimi Linear's form of it.

Its parts are projections, a short convolution, the gated delta rule, a norm and a gate. Decays, step sizes and states are fp32, whatever the type of
the weights.
"""

from typing import Self

import torch
import torch.nn.functional as F

from pilotlight.engine.description.recurrent_shapes import DeltaShape, KimiDeltaShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.short_conv import CausalConv
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Split
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
        of_key = shape.value_heads // shape.key_heads
        key, value = (shape.key_size, shape.key_dim), (shape.value_size, of_key * shape.value_dim)
        channels, of_heads = [key, key, value], (shape.value_heads, of_key)
        runs = {"in_proj_qkv": channels, "in_proj_z": [value], "in_proj_b": [of_heads], "in_proj_a": [of_heads]}
        if shape.is_grouped:
            runs = {part: [(rows, rows // shape.key_heads)] for part, rows in shape.projections.items()}
        return cls(
            [Linear.load_runs(loader, f"{name}.{part}", each, hidden_size, bias=False) for part, each in runs.items()],
            CausalConv.load(loader, [f"{name}.conv1d"], channels, shape.width, activates=True),
            wide.rows([f"{name}.A_log"], [shape.value_heads], split="rows", unit=of_key),
            wide.rows([f"{name}.dt_bias"], [shape.value_heads], split="rows", unit=of_key),
            loader.tensor(f"{name}.norm.weight", shape.value_dim),
            Linear.load(
                loader,
                [f"{name}.out_proj"],
                [hidden_size],
                shape.value_size,
                False,
                "columns",
                of_key * shape.value_dim,
            ),
            shape.part_of(loader.shard.size),
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        shape, cache = self.shape, context.caches[self.shape.layer]
        states, conv_state = cache.segments
        batch = context.states_of(cache)
        qkv, gate, steps, decays = self._projected(x, context)
        qkv = self.conv(qkv, conv_state, batch)
        states = torch.unflatten(states[:, 0], 2, (shape.key_dim, shape.value_dim))  # [blocks, value_heads, ...]
        key_heads = shape.key_heads
        if shape.is_tiled:
            qkv, key_heads = self._with_tiled_keys(qkv), shape.value_heads
        mixed = gated_delta_rule(qkv, steps, decays, self.decays, self.decay_bias, key_heads, states, batch)
        normed = gated_norm(mixed, gate, self.norm.unsqueeze(0), shape.eps, False)
        return context.summed(self.out_proj(normed.flatten(1), context))

    def _with_tiled_keys(self, qkv: torch.Tensor) -> torch.Tensor:
        """Repeat queries and keys for all value heads.

        [tokens, channels] -> [tokens, (2 * key_dim + value_dim) * value_heads]
        """
        shape = self.shape
        q, k, v = torch.split(qkv, [shape.key_size, shape.key_size, shape.value_size], dim=1)
        of_key = shape.value_heads // shape.key_heads
        return torch.cat((*[q] * of_key, *[k] * of_key, v), dim=1)

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


class KimiDeltaAttention:
    """Kimi Linear's form (arXiv 2510.26692): each row of a state has its own decay.

    Gates are sigmoids. Decays and gates are projected through as many numbers as a head has.
    """

    def __init__(
        self,
        qkv_proj: Linear,
        step_proj: Linear,
        decay_projs: tuple[Linear, Linear],
        gate_projs: tuple[Linear, Linear],
        conv: CausalConv,
        decays: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor,
        o_proj: Linear,
        shape: KimiDeltaShape,
    ) -> None:
        """`decays`: A_log [heads] and dt_bias [heads * head_dim], both fp32; `norm` [head_dim]."""
        self.qkv_proj = qkv_proj
        self.step_proj = step_proj
        self.decay_projs = decay_projs
        self.gate_projs = gate_projs
        self.conv = conv
        self.decays = decays
        self.norm = norm
        self.o_proj = o_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, layer_name: str, hidden_size: int, shape: KimiDeltaShape) -> Self:
        name, wide, size, dim = f"{layer_name}.{shape.name}", loader.with_dtype(torch.float32), shape.size, shape.dim
        own = loader.shard.span(shape.heads)

        def load(parts: str, rows: int, columns: int, *, unit: int = 0) -> Linear:
            names = [f"{name}.{part}_proj" for part in parts.split()]
            split: Split | None = "rows" if unit else None
            return Linear.load(loader, names, [rows] * len(names), columns, False, split, unit or 1)

        return cls(
            load("q k v", size, hidden_size, unit=dim),
            load("b", shape.heads, hidden_size, unit=1),
            (load("f_a", dim, hidden_size), load("f_b", size, dim, unit=dim)),
            (load("g_a", dim, hidden_size), load("g_b", size, dim, unit=dim)),
            CausalConv.load(
                loader, [f"{name}.{part}_conv1d" for part in "qkv"], [(size, dim)] * 3, shape.width, activates=True
            ),
            (
                wide.tensor(f"{name}.A_log", 1, 1, shape.heads, 1).flatten()[own.start : own.end],
                wide.rows([f"{name}.dt_bias"], [size], split="rows", unit=dim),
            ),
            loader.tensor(f"{name}.o_norm.weight", dim),
            Linear.load(loader, [f"{name}.o_proj"], [hidden_size], size, False, "columns", dim),
            shape.part_of(loader.shard.size),
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        shape, cache = self.shape, context.caches[self.shape.layer]
        states, conv_state = cache.segments
        batch = context.states_of(cache)
        qkv = self.conv(self.qkv_proj(x, context), conv_state, batch)
        steps, decays = self.step_proj(x, context), _through(self.decay_projs, x, context)
        states = torch.unflatten(states[:, 0], 2, (shape.dim, shape.dim))  # [blocks, heads, dim, dim]
        mixed = gated_delta_rule(qkv, steps, decays, *self.decays, shape.heads, states, batch)
        gate = _through(self.gate_projs, x, context).view_as(mixed)
        normed = F.rms_norm(mixed.float(), mixed.shape[2:], self.norm.float(), shape.eps) * gate.float().sigmoid()
        return context.summed(self.o_proj(normed.to(x.dtype).flatten(1), context))


def _through(projections: tuple[Linear, Linear], x: torch.Tensor, context: Context) -> torch.Tensor:
    narrow, wide = projections
    return wide(narrow(x, context), context)
