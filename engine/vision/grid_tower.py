"""The encoders of Qwen 2.5-VL and of Qwen 3-VL and 3.5, for still images of any size.

2 x 2 patches become one embedding. In 2.5-VL patches attend only within a window in most layers; in 3-VL, outputs of some layers become embeddings
for the decoder's first layers (DeepStack, Meng et al., arXiv 2406.04334). Tensors are named as in Qwen/Qwen2.5-VL-7B-Instruct (visual) and
Qwen/Qwen3-VL-8B-Instruct (model.visual).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.description.vision_config import GridVision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm, RMSNorm
from pilotlight.engine.vision.tower import (
    Compute,
    LayerNames,
    VisionLayer,
    Windows,
    frequencies,
    load_patches,
    square,
    stretched,
    turns_by_place,
)
from pilotlight.engine.weights.loader import WeightLoader

_EPS = 1e-6
ROOTS = ("visual.", "model.visual.")
FIRST = "patch_embed.proj.weight"
_LAYER = LayerNames("norm1", ["attn.qkv"], "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
_GATED_LAYER = _LAYER._replace(up="mlp.up_proj", down="mlp.down_proj", gate="mlp.gate_proj")


class Merger:
    """The projection of 2 x 2 patches to an embedding, after a norm of each patch or of all four joined."""

    def __init__(
        self, norm: Compute, joined_size: int, projections: tuple[Linear, Linear], *, joins_first: bool
    ) -> None:
        self._norm = norm
        self._joined_size = joined_size
        self._projections = projections
        self._joins_first = joins_first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden], each square's patches adjacent -> [patches / merge**2, decoder's hidden]"""
        if self._joins_first:
            x = x.reshape(-1, self._joined_size)
        first, last = self._projections
        return last.plain(F.gelu(first.plain(self._norm(x).reshape(-1, self._joined_size))))


class Order(NamedTuple):
    """The order in which patches are encoded: window by window, and within a window square by square."""

    patches: torch.Tensor  # [patches] int64, the index of each patch in the image, row by row
    squares: torch.Tensor  # [embeddings] int64, the index of each square of patches in the image, row by row
    windows: tuple[Windows, ...]


class GridEncoder:
    def __init__(self, shape: GridVision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden = shape.hidden_size
        self.shape = shape
        self.num_deep = len(shape.deep_layers)
        name = f"{root}patch_embed.proj"
        self.patches = load_patches(loader, name, hidden, shape.patch_size, shape.moments)
        self.patch_bias = None if shape.is_gated else loader.tensor(f"{name}.bias", hidden)
        self.positions = (
            loader.tensor(f"{root}pos_embed.weight", shape.num_positions, hidden) if shape.num_positions else None
        )
        norm = _rms_norm(loader, hidden) if shape.is_gated else _layer_norm(loader, hidden)
        self.layers = [
            VisionLayer.load(
                loader,
                (_GATED_LAYER if shape.is_gated else _LAYER).under(f"{root}blocks.{i}"),
                hidden,
                shape.intermediate_size,
                shape.num_heads,
                F.silu if shape.is_gated else partial(F.gelu, approximate="tanh"),
                norm=norm,
                turns_halves=True,
            )
            for i in range(shape.num_layers)
        ]
        joined = hidden * shape.merge**2

        def merger(norm: Compute, first: str, last: str, *, joins_first: bool = False) -> Merger:
            projections = (
                Linear.load(loader, [first], [joined], joined, bias=True),
                Linear.load(loader, [last], [decoder_size], joined, bias=True),
            )
            return Merger(norm, joined, projections, joins_first=joins_first)

        if shape.is_gated:
            self.merger = merger(norm(f"{root}merger.ln_q"), f"{root}merger.mlp.0", f"{root}merger.mlp.2")
        else:
            self.merger = merger(norm(f"{root}merger.norm"), f"{root}merger.linear_fc1", f"{root}merger.linear_fc2")
        self.deep_mergers = {
            layer: merger(
                _layer_norm(loader, joined)(f"{root}deepstack_merger_list.{i}.norm"),
                f"{root}deepstack_merger_list.{i}.linear_fc1",
                f"{root}deepstack_merger_list.{i}.linear_fc2",
                joins_first=True,
            )
            for i, layer in enumerate(shape.deep_layers)
        }

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, (1 + num_deep) * hidden]"""
        rows, columns, _ = patches.shape
        order = self._order(rows, columns, patches.device)
        x = F.linear(patches.flatten(0, 1), self.patches, self.patch_bias)
        if self.positions is not None:
            x = x + stretched(square(self.positions), rows, columns, "bilinear", align_corners=True)
        by_step = frequencies(self.shape.head_dim, self.shape.theta, x.device)
        x, turns = x[order.patches], turns_by_place(rows, columns, by_step, by_step)[order.patches]
        deep = []
        for i, layer in enumerate(self.layers):
            x = layer(x, turns, () if i in self.shape.full_layers else order.windows)
            if i in self.deep_mergers:
                deep.append(self.deep_mergers[i](x))
        encoded = torch.cat([self.merger(x), *deep], dim=1)
        return torch.empty_like(encoded).index_copy_(0, order.squares, encoded)

    def _order(self, rows: int, columns: int, device: torch.device) -> Order:
        merge, side = self.shape.merge, self.shape.window
        squares = torch.arange(rows * columns // merge**2, device=device).view(rows // merge, columns // merge)
        windows: tuple[Windows, ...] = ()
        if side:
            parts = []
            for band, height in _spans(squares, side, 0):
                for part, width in _spans(band, side, 1):
                    cut = part.reshape(len(part) // height, height, -1, width).transpose(1, 2).flatten()
                    parts.append(cut)
                    windows += (Windows(len(cut) // (height * width), height * width * merge**2),)
            squares = torch.cat(parts)
        squares = squares.flatten()
        places = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
        return Order(places.transpose(1, 2).reshape(-1, merge**2)[squares].flatten(), squares, windows)


def _spans(squares: torch.Tensor, side: int, dim: int) -> list[tuple[torch.Tensor, int]]:
    """Divide squares along a dimension into whole windows and a rest; return each part with its length."""
    size = squares.shape[dim]
    whole = size // side * side
    parts = [(squares.narrow(dim, 0, whole), side), (squares.narrow(dim, whole, size - whole), size - whole)]
    return [(part, length) for part, length in parts if part.shape[dim]]


def _layer_norm(loader: WeightLoader, size: int) -> Callable[[str], Compute]:
    return lambda name: LayerNorm.load(loader, name, size, _EPS)


def _rms_norm(loader: WeightLoader, size: int) -> Callable[[str], Compute]:
    return lambda name: RMSNorm.load(loader, name, size, NormKind(_EPS))
