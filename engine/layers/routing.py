"""Which experts each token goes to and with what weight: a projection of its hidden state, and a rule.

Knows the rules of families; refuses to know experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from pilotlight.engine.description.shapes import GroupedRouting
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.moe import route, route_in_groups


class Router(Protocol):
    @property
    def top_k(self) -> int: ...

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> weights [tokens, top_k] fp32, expert ids [tokens, top_k] int64"""


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
class GroupedRouter:
    """Sigmoids and a bias that balances experts, as DeepSeek-V3 has them: in fp32, as its published code computes them."""

    proj: Linear
    bias: torch.Tensor  # [experts] fp32
    rule: GroupedRouting

    @property
    def top_k(self) -> int:
        return self.rule.top_k

    @classmethod
    def load(
        cls, loader: WeightLoader, name: str, num_experts: int, hidden_size: int, rule: GroupedRouting
    ) -> "GroupedRouter":
        wide = loader.with_dtype(torch.float32)
        proj = Linear.load(wide, [name], [num_experts], hidden_size, bias=False)
        return cls(proj, wide.tensor(f"{name}.e_score_correction_bias", num_experts), rule)

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return route_in_groups(self.proj(x.float(), context), self.bias, *self.rule)


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """The largest logits choose, and their sigmoids weigh."""

    proj: Linear
    top_k: int

    def __call__(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.proj(x, context)
        _, expert_ids = route(logits, self.top_k, True)
        return logits.gather(1, expert_ids).float().sigmoid(), expert_ids
