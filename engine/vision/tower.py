"""Common parts of vision towers: a transformer over patches that attend to each other.

Queries and keys are rotated by the patch's row and column, except in towers with learned positions alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.weights.loader import WeightLoader

Compute = Callable[[torch.Tensor], torch.Tensor]


class LayerNames(NamedTuple):
    """The names of a layer's tensors, relative to the layer (see `under`)."""

    attention_norm: str
    qkv: Sequence[str]  # one tensor or several, which are stacked
    o: str
    feed_forward_norm: str
    up: str
    down: str
    gate: str | None = None

    def under(self, layer: str) -> "LayerNames":
        """Return the names in the checkpoint of a layer's tensors."""
        single = {part: f"{layer}.{name}" for part, name in self._asdict().items() if isinstance(name, str)}
        return self._replace(**single, qkv=[f"{layer}.{name}" for name in self.qkv])


class Windows(NamedTuple):
    """Consecutive windows of `length` patches each; patches attend only within their window."""

    number: int
    length: int


class VisionLayer:
    def __init__(
        self,
        num_heads: int,
        norms: tuple[Compute, Compute],
        qkv_proj: Linear,
        o_proj: Linear,
        feed_forward: Compute,
        *,
        turns_halves: bool = False,
    ) -> None:
        """`turns_halves`: rotation pairs each number of a head's first half with one of its second half.

        If False, rotation pairs neighbouring numbers.
        """
        self.num_heads = num_heads
        self.norms = norms
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.feed_forward = feed_forward
        self._turned = turned_halves if turns_halves else _turned

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        names: LayerNames,
        hidden: int,
        inner: int,
        num_heads: int,
        activation: Compute = F.gelu,
        *,
        norm: Callable[[str], Compute] | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        turns_halves: bool = False,
    ) -> "VisionLayer":
        """`norm`: loads a norm by its name; None loads LayerNorms.

        `bias`: projections have biases; `qkv_bias`: those of queries, keys and values have biases; if None, like `bias`.
        """

        def plain_norm(name: str) -> Compute:
            return LayerNorm.load(loader, name, hidden, 1e-5)

        attention_norm, feed_forward_norm = map(norm or plain_norm, (names.attention_norm, names.feed_forward_norm))
        rows = [3 * hidden // len(names.qkv)] * len(names.qkv)
        ups = [names.up] if names.gate is None else [names.gate, names.up]
        feed_forward = FeedForward if names.gate is None else GatedFeedForward
        return cls(
            num_heads,
            (attention_norm, feed_forward_norm),
            Linear.load(loader, names.qkv, rows, hidden, bias=bias if qkv_bias is None else qkv_bias),
            Linear.load(loader, [names.o], [hidden], hidden, bias=bias),
            feed_forward(
                Linear.load(loader, ups, [inner] * len(ups), hidden, bias=bias),
                Linear.load(loader, [names.down], [hidden], inner, bias=bias),
                activation,
            ),
            turns_halves=turns_halves,
        )

    def __call__(
        self, x: torch.Tensor, turns: torch.Tensor | None = None, windows: Sequence[Windows] = ()
    ) -> torch.Tensor:
        """Compute the layer for x [patches, hidden].

        `turns` [patches, 1, head_dim / 2] complex: rotations of the patches, if they are rotated. `windows`: the windows of all patches, in order; if
        empty, every patch attends to every patch.
        """
        q, k, v = self.qkv_proj.plain(self.norms[0](x)).view(len(x), 3, self.num_heads, -1).unbind(1)
        if turns is not None:
            q, k = self._turned(q, turns), self._turned(k, turns)
        x = x + self.o_proj.plain(_attended(q, k, v, windows or [Windows(1, len(x))]))
        return x + self.feed_forward(self.norms[1](x))


class FeedForward:
    def __init__(self, up_proj: Linear, down_proj: Linear, activation: Compute) -> None:
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.plain(self.activation(self.up_proj.plain(x)))


class GatedFeedForward(FeedForward):
    """A feed-forward whose `up_proj` stacks gate and up."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up_proj.plain(x).chunk(2, dim=-1)
        return self.down_proj.plain(self.activation(gate) * up)


def load_patches(loader: WeightLoader, name: str, hidden: int, patch: int, moments: int | None = None) -> torch.Tensor:
    """Load the projection of patches [hidden, 3 * patch * patch].

    `moments`: number of frames over which an encoder of videos sums products; None for an encoder of images. An image counts as equal frames, so the
    weights are summed over frames instead.
    """
    weight = loader.empty(f"{name}.weight", hidden, 3 * patch**2)
    stored = (hidden, 3, patch, patch) if moments is None else (hidden, 3, moments, patch, patch)
    loader.read(
        f"{name}.weight", weight, stored, lambda each: (each if moments is None else each.float().sum(2)).flatten(1)
    )
    return weight


def stretched(
    learned: torch.Tensor, rows: int, columns: int, mode: str, *, align_corners: bool = False
) -> torch.Tensor:
    """Return learned positions [rows, columns, hidden], interpolated to an image's rows * columns patches."""
    if learned.shape[:2] == (rows, columns):
        return learned.flatten(0, 1)
    table = learned.float().permute(2, 0, 1).unsqueeze(0)
    found = F.interpolate(table, (rows, columns), mode=mode, align_corners=align_corners)
    return found[0].permute(1, 2, 0).flatten(0, 1).to(learned.dtype)


def square(learned: torch.Tensor) -> torch.Tensor:
    """Return positions [rows * columns, hidden] of a square image as [rows, columns, hidden]."""
    return torch.unflatten(learned, 0, (round(len(learned) ** 0.5), -1))


def frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return the rotation of each pair per step along a row or a column, in radians: [head_dim / 4] fp32."""
    half = head_dim // 2
    return 1.0 / (theta ** (torch.arange(0, half, 2, device=device).float() / half))


def turns_by_place(rows: int, columns: int, by_row: torch.Tensor, by_column: torch.Tensor) -> torch.Tensor:
    """Return the rotations of every patch of an image, row by row: complex [patches, 1, head_dim / 2].

    `by_row`, `by_column` [head_dim / 4]: radians per row for the first half of a head's pairs, and per column for the second half.
    """
    row = torch.arange(rows, device=by_row.device).repeat_interleave(columns).float().unsqueeze(1)
    column = torch.arange(columns, device=by_row.device).repeat(rows).float().unsqueeze(1)
    return turns_of(torch.cat([row * by_row, column * by_column], dim=1))


def turns_of(angles: torch.Tensor) -> torch.Tensor:
    """Return rotations, complex [patches, 1, head_dim / 2], by angles [patches, head_dim / 2]."""
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: Sequence[Windows]) -> torch.Tensor:
    """Attend within windows; q, k, v [patches, heads, head_dim], result [patches, heads * head_dim]."""
    found, start = [], 0
    for number, length in windows:
        span = slice(start, start + number * length)
        queries, keys, values = (x[span].view(number, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        found.append(F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2).flatten(0, 1))
        start = span.stop
    return found[0] if len(found) == 1 else torch.cat(found)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring numbers of each head. x [patches, heads, head_dim]"""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(2).to(x.dtype)


def turned_halves(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of corresponding numbers of each head's two halves. x [patches, heads, ..., head_dim]"""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turns.real, turns.imag
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
