"""The sparse feed-forward: a router, its experts, and optionally one that every token uses.

Checkpoints store experts in one tensor per expert, or in one for all. This module is independent of families.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from pilotlight.engine.description.shapes import ExpertsShape, SparseShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.routing import Router, load_router
from pilotlight.engine.parallel.dispatch import RoutedTokens, dispatch
from pilotlight.engine.parallel.placement import ExpertPlacement
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.matrices.weight import GatedActivation, Weight
from pilotlight.kernels.moe import moe_experts

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class ExpertRoutes(NamedTuple):
    """A placement of experts on ranks, as tensors."""

    copies: torch.Tensor  # [experts], number of copies
    ranks: torch.Tensor  # [experts, ranks], the rank of each copy, padded with -1
    slots: torch.Tensor  # [experts + 1], slot of each expert on this rank, and -1 for experts of other ranks; the last entry, for expert -1, is -1

    @classmethod
    def of(cls, placement: ExpertPlacement, rank: int, device: torch.device) -> "ExpertRoutes":
        own, num_ranks = placement.slots[rank], len(placement.slots)
        ranks = [placement.ranks_of(expert) for expert in range(placement.num_experts)]
        slots = [own.index(expert) if rank in of else -1 for expert, of in enumerate(ranks)]
        return cls(
            torch.tensor([len(of) for of in ranks], device=device),
            torch.tensor([of + [-1] * (num_ranks - len(of)) for of in ranks], device=device),
            torch.tensor([*slots, -1], device=device),
        )

    def ranks_of(self, expert_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the rank that computes each pair of a token and an expert, [tokens, top_k].

        If an expert has several copies, the token's position alone decides which one computes it.
        """
        return self.ranks[expert_ids, positions.unsqueeze(1) % self.copies[expert_ids]]


class Experts:
    """The weights of experts.

    gate_up [experts, 2 * intermediate, hidden], gate rows, then up rows, or [experts, intermediate, hidden] if `activation` has no gate; down
    [experts, hidden, intermediate].
    """

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
        """`placement`: the experts of each rank; None if every rank has all experts, or a part of each."""
        self.placement = placement
        self.rank = rank
        self.seen: torch.Tensor | None = None  # [experts] int64, tokens that each expert got since the last reset
        self._routes: ExpertRoutes | None = None
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        shape: ExpertsShape,
        parts: Sequence[str],
        activation: GatedActivation = silu_and_mul,
    ) -> Self:
        """Load experts in the checkpoint's form: in stacks, transposed, or one by one."""
        if any(f"{name}.{stack}" in loader for stack in ("gate_up_proj", "down_proj")):
            return cls.load_stacks(loader, name, shape)
        return cls.load_each(loader, name, shape, parts, activation)

    @classmethod
    def load_each(
        cls,
        loader: WeightLoader,
        name: str,
        shape: ExpertsShape,
        parts: Sequence[str],
        activation: GatedActivation = silu_and_mul,
    ) -> Self:
        """Load one tensor per expert and part.

        `parts`: the checkpoint's names of gate, if any, up and down.
        """
        *ups, down = parts
        num_experts, hidden, intermediate = shape
        experts, placement, of = tuple(range(num_experts)), None, loader.shard.experts
        if of is not None:
            placement = ExpertPlacement.first(num_experts, of.size, of.spare)
            experts = placement.slots[of.rank]
            for i in set(range(num_experts)) - set(experts):
                loader.skip(rf"{re.escape(name)}\.{i}\..*")
            loader = loader.unshared()
        gate_ups = [f"{name}.{i}.{part}" for i in experts for part in ups]
        downs = [f"{name}.{i}.{down}" for i in experts]
        matrices = (
            loader.matrix(gate_ups, [intermediate] * len(gate_ups), hidden, experts=len(experts), split="rows"),
            loader.matrix(downs, [hidden] * len(experts), intermediate, experts=len(experts), split="columns"),
        )
        if len(experts) == 1:  # for one expert the loader returns plain matrices
            matrices = (matrices[0].by_expert(1), matrices[1].by_expert(1))
        return cls(*matrices, activation, placement=placement, rank=0 if of is None else of.rank)

    @classmethod
    def load_stacks(cls, loader: WeightLoader, name: str, shape: ExpertsShape) -> Self:
        """Load one tensor of all gates and ups, and one of downs."""
        num_experts, hidden, intermediate = shape
        return cls(
            loader.stack(f"{name}.gate_up_proj", num_experts, 2 * intermediate, hidden, split="rows", num_parts=2),
            loader.stack(f"{name}.down_proj", num_experts, hidden, intermediate, split="columns"),
        )

    @property
    def parts(self) -> list[torch.Tensor]:
        """Return the tensors of the weights; the first dimension is slots."""
        return [part for weight in (self.gate_up, self.down) for part in weight.expert_parts]

    def counted(self) -> torch.Tensor:
        """Return how many tokens went to each expert since the last reset, [experts] int64."""
        if self.seen is None:
            assert self.placement is not None
            self.seen = torch.zeros(self.placement.num_experts, dtype=torch.int64, device=self.parts[0].device)
        return self.seen

    def place(self, placement: ExpertPlacement) -> None:
        """Use another placement from now on. The weights must be in their slots already."""
        self.placement, self._routes = placement, None

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of the experts' sum, [tokens, hidden].

        x [tokens, hidden]; weights, expert_ids [tokens, top_k]; positions [tokens].
        """
        if self.placement is not None:
            return self._own_part(x, weights, expert_ids, positions)
        return self._full_sum(x, weights, expert_ids)

    def _full_sum(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum over all experts. This rank has each expert, whole or in part."""
        return moe_experts(
            x, weights, expert_ids, self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias
        )

    def _weighted(self, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the weighted summand of each pair of a token and an expert, [pairs, hidden] fp32.

        x [pairs, hidden]; weights [pairs, 1] fp32; slots [pairs, 1] of experts on this rank.
        """
        return self._full_sum(x, torch.ones_like(weights), slots).float() * weights

    def _own_part(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute only the experts of this rank, each for the tokens routed to it."""
        self.count(expert_ids)
        is_here = self.ranks_of(expert_ids, positions) == self.rank
        return self.own_sum(x, weights, torch.where(is_here, expert_ids, -1))

    def own_sum(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of this rank's experts for x, [tokens, hidden].

        Expert -1 is not computed. On a GPU, the host waits for the number of pairs of a token and an expert.
        """
        slots = self.routes_on(x.device).slots[expert_ids].flatten()
        pairs = (slots >= 0).nonzero().flatten()
        (tokens, top_k), hidden = expert_ids.shape, x.shape[1]
        outputs = torch.zeros(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
        if len(pairs):
            of_pairs = weights.flatten()[pairs].unsqueeze(1)
            outputs[pairs] = self._weighted(x[pairs // top_k], of_pairs, slots[pairs].unsqueeze(1))
        return outputs.view(tokens, top_k, hidden).sum(1).to(x.dtype)

    def count(self, expert_ids: torch.Tensor) -> None:
        """Count the tokens of each expert."""
        ids = expert_ids.flatten()
        self.seen = self.counted().index_add_(0, ids, torch.ones_like(ids))

    def ranks_of(self, expert_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the rank that computes each pair of a token and an expert, [tokens, top_k]."""
        return self.routes_on(expert_ids.device).ranks_of(expert_ids, positions)

    def routes_on(self, device: torch.device) -> ExpertRoutes:
        """Return the placement of the experts as tensors on `device`."""
        if self._routes is None:
            assert self.placement is not None
            self._routes = ExpertRoutes.of(self.placement, self.rank, device)
        return self._routes


class InputScaledExperts(Experts):
    """Experts whose weight multiplies the token before they compute it, not their result."""

    def _full_sum(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        tokens, top_k = expert_ids.shape
        each = (weights.view(-1, 1), expert_ids.view(-1, 1))
        outputs = self._weighted(x.repeat_interleave(top_k, 0), *each)
        return outputs.view(tokens, top_k, -1).sum(1).to(x.dtype)

    def _weighted(self, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        scaled = (x * weights).to(x.dtype)
        return super()._full_sum(scaled, torch.ones_like(weights), slots).float()


class SparseMLP:
    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
        scale: float = 1.0,
    ) -> None:
        """`shared`: an expert of all tokens, whose result is added.

        It is weighted by the sigmoid of `shared_gate`, if there is one. `latent`: projections to the size on which the experts work, and back.
        `scale`: factor of the result.
        """
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.latent = latent
        self.scale = scale

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        hidden_size: int,
        sparse: SparseShape,
        activation: GatedActivation = silu_and_mul,
    ) -> "SparseMLP":
        """Load a feed-forward whose tensor names start with `name`."""
        shape, routing, shared_size, names, scale, _ = sparse
        narrow, wide = (f"{name}.{part}" for part in names.latent)
        return cls(
            load_router(loader, name, names, shape.num_experts, hidden_size, routing),
            Experts.load(loader, f"{name}.{names.experts}", shape, names.parts, activation),
            GatedMLP.load(loader, f"{name}.{names.shared}", hidden_size, shared_size, activation=activation)
            if shared_size
            else None,
            Linear.load(loader, [f"{name}.{names.shared_gate}"], [1], hidden_size, bias=False)
            if names.shared_gate is not None
            else None,
            (
                Linear.load(loader, [narrow], [shape.hidden_size], hidden_size, bias=False),
                Linear.load(loader, [wide], [hidden_size], shape.hidden_size, bias=False),
            )
            if shape.hidden_size != hidden_size
            else None,
            scale,
        )

    def __call__(self, x: torch.Tensor, context: Context, read: torch.Tensor | None = None) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden].

        `read`: the experts' input, if it is not the router's.
        """
        weights, expert_ids = self.router(x, context)
        x = x if read is None else read
        positions, ranks = context.batch.positions, context.ranks
        routed = x if self.latent is None else self.latent[0](x, context)
        if ranks is not None and ranks.copies > 1:
            mixed = dispatch(self.experts, RoutedTokens(routed, weights, expert_ids), positions, ranks)
        else:
            mixed = self.experts(routed, weights, expert_ids, positions)
        if self.latent is not None:
            mixed = self.latent[1](mixed, context)
        if self.shared is not None:
            mixed = mixed + self._shared_part(self.shared, x, context)
        return context.summed(mixed if self.scale == 1.0 else mixed * self.scale)

    def _shared_part(self, shared: GatedMLP, x: torch.Tensor, context: Context) -> torch.Tensor:
        part = shared.part(x, context)
        return part if self.shared_gate is None else part * self.shared_gate(x, context).sigmoid()

    def serve(self, none: torch.Tensor, ranks: "Communicator") -> None:
        """Compute this rank's experts for tokens of other ranks, in a step in which this rank has no tokens.

        `none`: an empty tensor [0, hidden], in the type and on the device of hidden states.
        """
        none = none if self.latent is None else self.latent[0].plain(none)
        weights = none.new_empty(0, self.router.top_k, dtype=torch.float32)
        dispatch(self.experts, RoutedTokens(none, weights, weights.long()), weights.new_empty(0).long(), ranks)


class ParallelFeedForward(NamedTuple):
    """A dense feed-forward and experts that read the same hidden states, each between norms (Gemma 4)."""

    dense: GatedMLP
    sparse: SparseMLP
    dense_norms: Sequence[RMSNorm]  # before and after it
    sparse_norms: Sequence[RMSNorm]  # before the experts, but not their router, and after them

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        (before, after), (before_experts, after_experts) = self.dense_norms, self.sparse_norms
        return after(self.dense(before(x), context)) + after_experts(self.sparse(x, context, before_experts(x)))
