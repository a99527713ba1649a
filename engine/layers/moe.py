"""The sparse feed-forward: a router, the experts it chooses from, and one that every token goes to.

Knows how checkpoints keep experts, one tensor per expert or one for all; refuses to know the families that do so.
"""

import re
from collections.abc import Sequence
from typing import Self

import torch

from engine.context import Context
from engine.description.shapes import ExpertsShape
from engine.layers.mlp import GatedMLP
from engine.layers.routing import Router
from engine.weights.loader import WeightLoader
from engine.weights.shard import AxisRange
from kernels.activation import silu_and_mul
from kernels.moe import moe_experts
from kernels.weight import GatedActivation, Weight


class Experts:
    """gate_up [experts, 2 * intermediate, hidden], gate rows above up rows; down [experts, hidden, intermediate]."""

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        activation: GatedActivation = silu_and_mul,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        span: AxisRange | None = None,
    ) -> None:
        """`span`: the experts that this rank has; None: all, or a part of each."""
        self.span = None if span is None or span.is_whole else span
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias

    @classmethod
    def load_each(cls, loader: WeightLoader, name: str, shape: ExpertsShape, parts: Sequence[str]) -> Self:
        """Load one tensor per expert and part; `parts` are what the checkpoint calls gate, up and down."""
        gate, up, down = parts
        num_experts, hidden, intermediate = shape
        span = loader.shard.experts(num_experts, name)
        experts = range(span.start, span.end)
        if not span.is_whole:
            for i in set(range(num_experts)) - set(experts):
                loader.skip(rf"{re.escape(name)}\.{i}\..*")
            loader = loader.unshared()
        gate_ups = [f"{name}.{i}.{part}" for i in experts for part in (gate, up)]
        downs = [f"{name}.{i}.{down}" for i in experts]
        return cls(
            loader.matrix(gate_ups, [intermediate] * len(gate_ups), hidden, experts=len(experts), split="rows"),
            loader.matrix(downs, [hidden] * len(experts), intermediate, experts=len(experts), split="columns"),
            span=span,
        )

    @classmethod
    def load_stacks(cls, loader: WeightLoader, name: str, shape: ExpertsShape) -> Self:
        """Load one tensor of gates above ups, and one of downs."""
        num_experts, hidden, intermediate = shape
        return cls(
            loader.stack(f"{name}.gate_up_proj", num_experts, 2 * intermediate, hidden, split="rows", num_parts=2),
            loader.stack(f"{name}.down_proj", num_experts, hidden, intermediate, split="columns"),
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden]; weights, expert_ids [tokens, top_k] -> [tokens, hidden], this rank's part of the sum"""
        if self.span is not None:
            return self._own_part(x, weights, expert_ids, self.span)
        return moe_experts(
            x, weights, expert_ids, self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias
        )

    def _own_part(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, span: AxisRange
    ) -> torch.Tensor:
        """Compute the experts that are here alone, each for the tokens that go to it: on a GPU, the host waits to know how many."""
        pairs = ((expert_ids >= span.start) & (expert_ids < span.end)).flatten().nonzero().flatten()
        (tokens, top_k), hidden = expert_ids.shape, x.shape[1]
        outputs = torch.zeros(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
        if len(pairs):
            ids = expert_ids.flatten()[pairs].unsqueeze(1) - span.start
            ones = torch.ones(len(pairs), 1, dtype=torch.float32, device=x.device)
            own = moe_experts(x[pairs // top_k], ones, ids, self.gate_up, self.down, self.activation)
            outputs[pairs] = own.float() * weights.flatten()[pairs].unsqueeze(1)
        return outputs.view(tokens, top_k, hidden).sum(1).to(x.dtype)


class InputScaledExperts(Experts):
    """Experts for which a token is multiplied by their weight before they compute it, and not what they make of it."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        tokens, top_k = expert_ids.shape
        scaled = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
        outputs = super().__call__(scaled, torch.ones_like(weights).view(-1, 1), expert_ids.view(-1, 1))
        return outputs.view(tokens, top_k, -1).sum(1)


class SparseMLP:
    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None = None) -> None:
        """`shared`: an expert of all tokens, whose result is added."""
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        mixed = self.experts(x, *self.router(x, context))
        if self.shared is not None:
            mixed = mixed + self.shared.part(x, context)
        return context.summed(mixed)
