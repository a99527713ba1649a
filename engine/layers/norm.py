"""Normalisations with their weights: of hidden states, with residual addition or not, and of heads."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.execution.context import Context
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.norm import add_rms_norm, head_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, loader: WeightLoader, name: str, size: int, kind: NormKind) -> "RMSNorm":
        return cls(_load_weight(loader, name, size, kind), kind.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual); a residual of None counts as 0."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Normalisation by mean and variance, with a bias in most encoders, without one in Cohere's decoders."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    @classmethod
    def load(cls, loader: WeightLoader, name: str, size: int, eps: float, *, bias: bool = True) -> "LayerNorm":
        return cls(loader.tensor(f"{name}.weight", size), loader.tensor(f"{name}.bias", size) if bias else None, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual); a residual of None counts as 0."""
        summed = x if residual is None else x + residual
        return self(summed), summed


Norm = RMSNorm | LayerNorm


def load_norm(loader: WeightLoader, name: str, size: int, kind: NormKind) -> Norm:
    """Load a norm of hidden states."""
    if kind.is_centered:
        return LayerNorm.load(loader, name, size, kind.eps, bias=False)
    return RMSNorm.load(loader, name, size, kind)


class HeadNorm:
    """Separate normalisation of each head, query and key heads in one call; weight [heads, head_dim]."""

    def __init__(self, weight: torch.Tensor, eps: float, is_centered: bool = False) -> None:
        self.weight = weight
        self.eps = eps
        self.is_centered = is_centered

    @classmethod
    def load(
        cls, loader: WeightLoader, names: Sequence[str], heads: Sequence[int], head_dim: int, kind: NormKind
    ) -> "HeadNorm":
        """Load a norm.

        The checkpoint has one row for all query heads and one for all key heads, or one for each head if `kind` is centered. `heads`: numbers of
        query and key heads of all ranks; without a second name only queries are normalised.
        """
        if kind.is_centered:
            weight = loader.rows([f"{name}.weight" for name in names], heads[: len(names)], head_dim, split="rows")
            return cls(weight, kind.eps, is_centered=True)
        heads = loader.shard.heads(heads, names[0])[: len(names)]
        weight = _loader_for(loader, kind).empty(f"{names[0]}.weight...", sum(heads), head_dim)
        for name, part in zip(names, torch.split(weight, list(heads)), strict=True):
            loader.read(f"{name}.weight", part, (head_dim,), lambda row: _add_offset(row, kind))
        return cls(weight, kind.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [tokens, heads, head_dim]."""
        if self.is_centered:
            return (F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight).to(x.dtype)
        return head_rms_norm(x, self.weight, self.eps)


class JointNorm:
    """Joint normalisation of all queries of a token, and of all its keys, by one mean square each.

    weight [heads + kv_heads, head_dim], for one rank's heads.
    """

    def __init__(self, weight: torch.Tensor, eps: float, numbers: Sequence[int]) -> None:
        """`numbers`: total size of a token's queries on this rank, and that of its keys."""
        self.weight = weight
        self.eps = eps
        self.numbers = numbers

    @classmethod
    def load(
        cls, loader: WeightLoader, names: Sequence[str], sizes: Sequence[int], head_dim: int, kind: NormKind
    ) -> "JointNorm":
        weights = [f"{name}.weight" for name in names]
        own = [
            loader.shard.span(size, head_dim, name, may_repeat=True).size
            for name, size in zip(weights, sizes, strict=True)
        ]
        weight = loader.rows(weights, sizes, split="rows", unit=head_dim)
        return cls(weight.view(-1, head_dim), kind.eps, own)

    def __call__(self, qk: torch.Tensor, context: Context) -> torch.Tensor:
        """Normalise qk [tokens, heads + kv_heads, head_dim]."""
        tokens, head_dim = qk.shape[0], qk.shape[2]
        wide = qk.float()
        parts = torch.split(wide, [numbers // head_dim for numbers in self.numbers], dim=1)
        # Keys that several ranks have are counted several times, both in the sum and in its divisor.
        squares = torch.stack([part.square().sum((1, 2)) for part in parts], dim=1)
        ranks = 1 if context.ranks is None else context.ranks.shard.size
        sums = context.summed(squares).view(tokens, 1, 2)
        normed = [
            part * (sums[..., i : i + 1] / (ranks * numbers) + self.eps).rsqrt()
            for i, (part, numbers) in enumerate(zip(parts, self.numbers, strict=True))
        ]
        return (torch.cat(normed, dim=1) * self.weight).to(qk.dtype)


def _load_weight(loader: WeightLoader, name: str, size: int, kind: NormKind) -> torch.Tensor:
    weight = _loader_for(loader, kind).empty(f"{name}.weight", size)
    loader.read(f"{name}.weight", weight, (size,), lambda stored: _add_offset(stored, kind))
    return weight


def _loader_for(loader: WeightLoader, kind: NormKind) -> WeightLoader:
    # In bf16 the sum 1 + weight would have only 8 significant bits, so the weight stays in fp32, like the products of the kernel.
    return loader.with_dtype(torch.float32) if kind.offset else loader


def _add_offset(stored: torch.Tensor, kind: NormKind) -> torch.Tensor:
    return stored.float() + kind.offset if kind.offset and not kind.is_added else stored
