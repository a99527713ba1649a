"""Gemma 4's encoder, for still images of any size.

The means of squares of patches are projected to embeddings. Tensors are named as in google/gemma-4-31B-it (vision_tower, embed_vision).
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.description.vision_config import Gemma4Vision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.vision.tower import frequencies, turned_halves, turns_by_place
from pilotlight.engine.weights.loader import WeightLoader

ROOTS = ("model.", "")
FIRST = "embed_vision.embedding_projection.weight"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear:
    def __init__(self, linear: Linear, bounds: torch.Tensor | None) -> None:
        """`bounds` [4]: the least and largest input, and the least and largest output."""
        self.linear = linear
        self.bounds = bounds

    @classmethod
    def load(cls, loader: WeightLoader, name: str, rows: int, columns: int, *, is_clipped: bool) -> "ClippedLinear":
        linear = Linear.load(loader, [f"{name}.linear"], [rows], columns, bias=False)
        if not is_clipped:
            return cls(linear, None)
        bounds = loader.empty(f"{name}.bounds", len(_BOUNDS))
        for i, bound in enumerate(_BOUNDS):
            loader.read(f"{name}.{bound}", bounds[i : i + 1], (), lambda stored: stored)
        return cls(linear, bounds)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bounds is None:
            return self.linear.plain(x)
        least, largest, least_output, largest_output = self.bounds
        return self.linear.plain(x.clamp(least, largest)).clamp(least_output, largest_output)


class Gemma4VisionLayer:
    def __init__(self, shape: Gemma4Vision, loader: WeightLoader, name: str) -> None:
        hidden, inner, width = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
        kind = NormKind(shape.eps)

        def linear(part: str, rows: int, columns: int) -> ClippedLinear:
            return ClippedLinear.load(loader, f"{name}.{part}", rows, columns, is_clipped=shape.is_clipped)

        def norm(part: str, size: int = hidden) -> RMSNorm:
            return RMSNorm.load(loader, f"{name}.{part}", size, kind)

        self.shape = shape
        self.attention_norms = norm("input_layernorm"), norm("post_attention_layernorm")
        self.q_proj, self.k_proj, self.v_proj = (linear(f"self_attn.{part}_proj", width, hidden) for part in "qkv")
        self.o_proj = linear("self_attn.o_proj", hidden, width)
        self.q_norm, self.k_norm = (norm(f"self_attn.{part}_norm", shape.head_dim) for part in "qk")
        self.feed_forward_norms = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.gate_proj, self.up_proj = (linear(f"mlp.{part}_proj", inner, hidden) for part in ("gate", "up"))
        self.down_proj = linear("mlp.down_proj", hidden, inner)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Compute the layer for x [patches, hidden].

        `turns` [patches, 1, 2, head_dim / 4] complex: rotations of the patches by column and by row.
        """
        before, after = self.attention_norms
        x = x + after(self._attended(before(x), turns))
        before, after = self.feed_forward_norms
        y = before(x)
        gated = F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y)
        return x + after(self.down_proj(gated))

    def _attended(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        heads = self.shape.num_heads
        q, k, v = (proj(x).view(len(x), heads, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            turned_halves(norm(part.flatten(0, 1)).view(len(x), heads, 2, -1), turns).flatten(2)
            for norm, part in ((self.q_norm, q), (self.k_norm, k))
        )
        v = F.rms_norm(v.float(), v.shape[2:], None, self.shape.eps).to(v.dtype)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class Gemma4Encoder:
    num_deep = 0

    def __init__(self, shape: Gemma4Vision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden, patch, tower = shape.hidden_size, shape.patch_size, f"{root}vision_tower"
        self.shape = shape
        name = f"{tower}.patch_embedder.input_proj.weight"
        self.patches = loader.empty(name, hidden, 3 * patch**2)
        loader.read(name, self.patches, None, lambda each: torch.unflatten(each, 1, (-1, 3)).transpose(1, 2).flatten(1))
        self.positions = loader.tensor(
            f"{tower}.patch_embedder.position_embedding_table", 2, shape.num_positions, hidden
        )
        self.layers = [Gemma4VisionLayer(shape, loader, f"{tower}.encoder.layers.{i}") for i in range(shape.num_layers)]
        self.standard = (
            [loader.tensor(f"{tower}.{part}", hidden) for part in ("std_bias", "std_scale")]
            if shape.is_standardized
            else []
        )
        name = f"{root}embed_vision.embedding_projection"
        self.projection = Linear.load(loader, [name], [decoder_size], hidden, bias=False)

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, hidden]"""
        rows, columns, _ = patches.shape
        by_column, by_row = self.positions[0, :columns], self.positions[1, :rows]
        x = F.linear(patches, self.patches) + (by_column + by_row.unsqueeze(1))
        x = x.flatten(0, 1)
        by_step = frequencies(self.shape.head_dim, self.shape.theta, x.device)
        turns = torch.unflatten(turns_by_place(rows, columns, by_step, by_step), 2, (2, -1)).flip(2)
        for layer in self.layers:
            x = layer(x, turns)
        merge = self.shape.merge
        pooled = x.float().view(rows // merge, merge, columns // merge, merge, -1).mean((1, 3)).flatten(0, 1)
        pooled = pooled.to(x.dtype).float() * self.shape.hidden_size**0.5
        if self.standard:
            bias, scale = self.standard
            pooled = (pooled - bias.float()) * scale.float()
        pooled = pooled.to(x.dtype).float()
        return self.projection.plain(F.rms_norm(pooled, pooled.shape[1:], None, self.shape.eps).to(x.dtype))
