"""Routing of tokens to experts with weights: a projection of the hidden state, and a rule.

This module is independent of the experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from pilotlight.engine.description.shapes import ExpertNames, Routing
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.moe import in_best_groups, route, route_in_groups


class Router(Protocol):
    @property
    def top_k(self) -> int: ...

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [tokens, top_k] fp32 and expert ids [tokens, top_k] int64 for x [tokens, hidden]."""


def load_router(
    loader: WeightLoader, name: str, names: ExpertNames, num_experts: int, hidden_size: int, rule: Routing
) -> Router:
    """Load the router of the feed-forward `name`, with the names of its parts."""
    router, wide = f"{name}.{names.router}", loader.with_dtype(torch.float32)
    if not rule.is_wide and rule.scores == "sigmoid":
        proj = Linear.load(loader, [router], [num_experts], hidden_size, bias=False)
        return SigmoidRouter(proj, rule.top_k, rule.renormalise)
    if not rule.is_wide:
        plain = SoftmaxRouter.load(loader, router, num_experts, hidden_size, rule.top_k, renormalise=rule.renormalise)
        if rule.norm_eps is None:
            return plain
        norm, scales = (f"{name}.{part}" for part in names.router_scales)
        weight = wide.empty(norm, hidden_size)
        wide.read(norm, weight, (hidden_size,), lambda stored: stored.float() * hidden_size**-0.5)
        return ScaledRouter(RMSNorm(weight, rule.norm_eps), plain, wide.tensor(scales, num_experts))
    proj = Linear.load(wide, [router], [num_experts], hidden_size, bias=False)
    bias = _balancing_bias(wide, f"{name}.{names.bias}", num_experts) if rule.is_biased else None
    if rule.scores == "softmax":
        return WideSoftmaxRouter(proj, bias, rule)
    assert bias is not None, "sigmoids come with a bias"
    return GroupedRouter(proj, bias, rule)


def _balancing_bias(loader: WeightLoader, name: str, num_experts: int) -> torch.Tensor:
    """Load a vector, or a matrix of one row, as Ernie 4.5 stores it."""
    is_row = name in loader and len(loader.shape(name)) == 2
    return loader.tensor(name, *((1,) if is_row else ()), num_experts).view(num_experts)


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    proj: Linear
    top_k: int
    renormalise: bool

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        *,
        renormalise: bool,
        bias: bool = False,
    ) -> "SoftmaxRouter":
        return cls(Linear.load(loader, [name], [num_experts], hidden_size, bias), top_k, renormalise)

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return route(self.proj(x, context), self.top_k, self.renormalise)


@dataclass(frozen=True, slots=True)
class ScaledRouter:
    """A router of normalised hidden states that scales the weight of each expert (Gemma 4)."""

    norm: RMSNorm
    router: SoftmaxRouter
    scales: torch.Tensor  # [experts] fp32

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        weights, expert_ids = self.router(self.norm(x), context)
        return weights * self.scales[expert_ids], expert_ids


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """A router with sigmoids and a balancing bias, as in DeepSeek-V3, in fp32 like its published code."""

    proj: Linear
    bias: torch.Tensor  # [experts] fp32
    rule: Routing

    @property
    def top_k(self) -> int:
        return self.rule.top_k

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        rule = self.rule
        logits = self.proj(x.float(), context)
        groups = (rule.top_k, rule.groups, rule.top_groups, rule.renormalise, rule.scale)
        return route_in_groups(logits, self.bias, *groups)


@dataclass(frozen=True, slots=True)
class WideSoftmaxRouter:
    """A router with an fp32 softmax over all experts.

    The choice may be limited to the best groups (DeepSeek-V2, arXiv 2405.04434, section 2.2.2), or a balancing bias may change it, but not the
    weights (Ernie 4.5).
    """

    proj: Linear
    bias: torch.Tensor | None  # [experts] fp32
    rule: Routing

    @property
    def top_k(self) -> int:
        return self.rule.top_k

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        rule, scores = self.rule, self.proj(x.float(), context).softmax(-1)
        choosing = scores if self.bias is None else scores + self.bias
        if rule.top_groups < rule.groups:
            choosing = in_best_groups(choosing, rule.groups, rule.top_groups, rule.group_best)
        expert_ids = choosing.topk(rule.top_k, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if rule.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * rule.scale, expert_ids


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """A router that chooses the largest logits and weighs by their sigmoids."""

    proj: Linear
    top_k: int
    renormalise: bool = False

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.proj(x, context)
        _, expert_ids = route(logits, self.top_k, True)
        weights = logits.gather(1, expert_ids).float().sigmoid()
        return weights / weights.sum(1, keepdim=True) if self.renormalise else weights, expert_ids
