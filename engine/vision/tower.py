"""Common parts of vision towers: a transformer over patches that all attend to each other.

Queries and keys are rotated by the patch's row and column.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.weights.loader import WeightLoader


class LayerNames(NamedTuple):
    """A layer's tensors in the checkpoint."""

    attention_norm: str
    qkv: Sequence[str]  # one below the other
    o: str
    feed_forward_norm: str
    up: str
    down: str


class VisionLayer:
    def __init__(
        self,
        num_heads: int,
        norms: tuple[LayerNorm, LayerNorm],
        qkv_proj: Linear,
        o_proj: Linear,
        up_proj: Linear,
        down_proj: Linear,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.num_heads = num_heads
        self.norms = norms
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        names: LayerNames,
        hidden: int,
        inner: int,
        num_heads: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
    ) -> "VisionLayer":
        norms = [LayerNorm.load(loader, name, hidden, 1e-5) for name in (names.attention_norm, names.feed_forward_norm)]
        rows = [3 * hidden // len(names.qkv)] * len(names.qkv)
        return cls(
            num_heads,
            (norms[0], norms[1]),
            Linear.load(loader, names.qkv, rows, hidden, bias=True),
            Linear.load(loader, [names.o], [hidden], hidden, bias=True),
            Linear.load(loader, [names.up], [inner], hidden, bias=True),
            Linear.load(loader, [names.down], [hidden], inner, bias=True),
            activation,
        )

    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden]; turns [patches, 1, head_dim / 2] complex"""
        qkv = self.qkv_proj.plain(self.norms[0](x)).view(len(x), 3, self.num_heads, -1)
        q, k = (_turned(part, turns).transpose(0, 1).unsqueeze(0) for part in (qkv[:, 0], qkv[:, 1]))
        v = qkv[:, 2].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(len(x), -1)
        x = x + self.o_proj.plain(attended)
        return x + self.down_proj.plain(self.activation(self.up_proj.plain(self.norms[1](x))))


def frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return the angles by which one step along a row or a column turns: [head_dim / 4] fp32."""
    half = head_dim // 2
    return 1.0 / (theta ** (torch.arange(0, half, 2, device=device).float() / half))


def turns_of(angles: torch.Tensor) -> torch.Tensor:
    """angles [patches, head_dim / 2] -> complex [patches, 1, head_dim / 2]"""
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn neighbours of each head, as pairs. x [patches, heads, head_dim]"""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(2).to(x.dtype)
