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
from engine.parallel.placement import ExpertPlacement
from engine.weights.loader import WeightLoader
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
        placement: ExpertPlacement | None = None,
        rank: int = 0,
    ) -> None:
        """`placement`: which experts this rank and the others of its stage have; None: it has all, or a part of each."""
        self.placement = placement
        self.rank = rank
        self.seen: torch.Tensor | None = None  # [experts] int64, pairs of a token and an expert since the last look
        self._routes: tuple[torch.Tensor, torch.Tensor] | None = None
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
        experts, placement, shard = tuple(range(num_experts)), None, loader.shard
        if not span.is_whole:
            placement = ExpertPlacement.first(num_experts, shard.size, shard.spare_experts)
            experts = placement.slots[shard.rank]
            for i in set(range(num_experts)) - set(experts):
                loader.skip(rf"{re.escape(name)}\.{i}\..*")
            loader = loader.unshared()
        gate_ups = [f"{name}.{i}.{part}" for i in experts for part in (gate, up)]
        downs = [f"{name}.{i}.{down}" for i in experts]
        return cls(
            loader.matrix(gate_ups, [intermediate] * len(gate_ups), hidden, experts=len(experts), split="rows"),
            loader.matrix(downs, [hidden] * len(experts), intermediate, experts=len(experts), split="columns"),
            placement=placement,
            rank=shard.rank,
        )

    @classmethod
    def load_stacks(cls, loader: WeightLoader, name: str, shape: ExpertsShape) -> Self:
        """Load one tensor of gates above ups, and one of downs."""
        num_experts, hidden, intermediate = shape
        return cls(
            loader.stack(f"{name}.gate_up_proj", num_experts, 2 * intermediate, hidden, split="rows", num_parts=2),
            loader.stack(f"{name}.down_proj", num_experts, hidden, intermediate, split="columns"),
        )

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors of the weights, a slot's first dimension."""
        return [part for weight in (self.gate_up, self.down) for part in weight.expert_parts]

    def counted(self) -> torch.Tensor:
        """Return how many tokens went to each expert since the last look, [experts] int64."""
        if self.seen is None:
            assert self.placement is not None
            self.seen = torch.zeros(self.placement.num_experts, dtype=torch.int64, device=self.parts[0].device)
        return self.seen

    def place(self, placement: ExpertPlacement) -> None:
        """Have the experts in these slots from now on, whose weights are there."""
        self.placement, self._routes = placement, None

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """x [tokens, hidden]; weights, expert_ids [tokens, top_k]; positions [tokens] -> [tokens, hidden], this rank's part of the sum"""
        if self.placement is not None:
            return self._own_part(x, weights, expert_ids, positions)
        return moe_experts(
            x, weights, expert_ids, self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias
        )

    def _own_part(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts that are here alone, each for the tokens that go to it: on a GPU, the host waits to know how many. Which of an expert's
        copies computes a token is told by its position: by no other token of the step."""
        copies, slots_of = self._routes_on(x.device)
        slots = slots_of[expert_ids, positions.unsqueeze(1) % copies[expert_ids]].flatten()
        pairs = (slots >= 0).nonzero().flatten()
        (tokens, top_k), hidden = expert_ids.shape, x.shape[1]
        self.seen = self.counted().index_add_(0, expert_ids.flatten(), torch.ones_like(slots))
        outputs = torch.zeros(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
        if len(pairs):
            ids = slots[pairs].unsqueeze(1)
            ones = torch.ones(len(pairs), 1, dtype=torch.float32, device=x.device)
            own = moe_experts(x[pairs // top_k], ones, ids, self.gate_up, self.down, self.activation)
            outputs[pairs] = own.float() * weights.flatten()[pairs].unsqueeze(1)
        return outputs.view(tokens, top_k, hidden).sum(1).to(x.dtype)

    def _routes_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many copies each expert has, [experts], and the slot of each that is on this rank, [experts, ranks]: -1 for others'."""
        if self._routes is None:
            assert self.placement is not None
            own, num_ranks = self.placement.slots[self.rank], len(self.placement.slots)
            ranks = [self.placement.ranks_of(expert) for expert in range(self.placement.num_experts)]
            here = [[own.index(i) if rank == self.rank else -1 for rank in of] for i, of in enumerate(ranks)]
            slots = torch.tensor([row + [-1] * (num_ranks - len(row)) for row in here], device=device)
            self._routes = torch.tensor([len(of) for of in ranks], device=device), slots
        return self._routes


class InputScaledExperts(Experts):
    """Experts for which a token is multiplied by their weight before they compute it, and not what they make of it."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        tokens, top_k = expert_ids.shape
        scaled = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
        each = positions.repeat_interleave(top_k)
        outputs = super().__call__(scaled, torch.ones_like(weights).view(-1, 1), expert_ids.view(-1, 1), each)
        return outputs.view(tokens, top_k, -1).sum(1)


class SparseMLP:
    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None = None) -> None:
        """`shared`: an expert of all tokens, whose result is added."""
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        mixed = self.experts(x, *self.router(x, context), context.batch.positions)
        if self.shared is not None:
            mixed = mixed + self.shared.part(x, context)
        return context.summed(mixed)
