"""The encoder of GLM-4.1V, 4.5V and 4.6V, for still images of any size.

2 x 2 patches become one embedding. Tensors are named as in zai-org/GLM-4.1V-9B-Thinking (model.visual).
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.description.vision_config import GlmVision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm, RMSNorm
from pilotlight.engine.vision.tower import (
    Compute,
    GatedFeedForward,
    LayerNames,
    VisionLayer,
    frequencies,
    load_patches,
    square,
    stretched,
    turns_by_place,
)
from pilotlight.engine.weights.loader import WeightLoader

ROOTS = ("model.visual.", "visual.")
FIRST = "post_conv_layernorm.weight"
_LAYER = LayerNames("norm1", ["attn.qkv"], "attn.proj", "norm2", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")


class GlmEncoder:
    num_deep = 0

    def __init__(self, shape: GlmVision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden, merge, output = shape.hidden_size, shape.merge, shape.output_size
        self.shape = shape
        name = f"{root}patch_embed.proj"
        self.patches = load_patches(loader, name, hidden, shape.patch_size, shape.moments)
        self.patch_bias = loader.tensor(f"{name}.bias", hidden)

        def norm(name: str) -> Compute:
            return RMSNorm.load(loader, name, hidden, NormKind(shape.eps))

        self.first_norm = norm(f"{root}post_conv_layernorm")
        self.positions = loader.tensor(f"{root}embeddings.position_embedding.weight", shape.num_positions, hidden)
        self.layers = [
            VisionLayer.load(
                loader,
                _LAYER.under(f"{root}blocks.{i}"),
                hidden,
                output,
                shape.num_heads,
                F.silu,
                norm=norm,
                bias=False,
                qkv_bias=shape.has_bias,
                turns_halves=True,
            )
            for i in range(shape.num_layers)
        ]
        self.last_norm = norm(f"{root}post_layernorm")
        name, joined = f"{root}downsample", hidden * merge**2
        self.joined = loader.empty(f"{name}.weight", output, joined)
        loader.read(f"{name}.weight", self.joined, (output, hidden, merge, merge), lambda weight: weight.flatten(1))
        self.joined_bias = loader.tensor(f"{name}.bias", output)
        name, inner = f"{root}merger", shape.merger_size
        self.projection = Linear.load(loader, [f"{name}.proj"], [output], output, bias=False)
        self.projection_norm = LayerNorm.load(loader, f"{name}.post_projection_norm", output, 1e-5)
        self.merger = GatedFeedForward(
            Linear.load(loader, [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], output, bias=False),
            Linear.load(loader, [f"{name}.down_proj"], [decoder_size], inner, bias=False),
            F.silu,
        )

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, hidden]"""
        rows, columns, _ = patches.shape
        x = self.first_norm(F.linear(patches.flatten(0, 1), self.patches, self.patch_bias))
        x = x + stretched(square(self.positions), rows, columns, "bicubic")
        by_step = frequencies(self.shape.head_dim, self.shape.theta, x.device)
        turns = turns_by_place(rows, columns, by_step, by_step)
        for layer in self.layers:
            x = layer(x, turns)
        merge = self.shape.merge
        squares = self.last_norm(x).view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        joined = F.linear(squares.reshape(-1, merge**2 * x.shape[1]), self.joined, self.joined_bias)
        return self.merger(F.gelu(self.projection_norm(self.projection.plain(joined))))
