"""Gemma 3's encoder, SigLIP, for square images of one size.

The means of squares of patches are projected to embeddings. Tensors are named as in google/gemma-3-4b-it (vision_tower, multi_modal_projector).
"""

from functools import partial

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.description.vision_config import SiglipVision
from pilotlight.engine.layers.norm import LayerNorm, RMSNorm
from pilotlight.engine.vision.tower import Compute, LayerNames, VisionLayer, load_patches
from pilotlight.engine.weights.loader import WeightLoader

ROOTS = ("", "model.")
FIRST = "multi_modal_projector.mm_input_projection_weight"
_LAYER = LayerNames(
    "layer_norm1",
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.out_proj",
    "layer_norm2",
    "mlp.fc1",
    "mlp.fc2",
)


class SiglipEncoder:
    num_deep = 0

    def __init__(self, shape: SiglipVision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden, tower = shape.hidden_size, f"{root}vision_tower."
        if f"{tower}vision_model.post_layernorm.weight" in loader:  # as published; transformers 5 writes shorter names
            tower = f"{tower}vision_model."
        self.shape = shape
        name = f"{tower}embeddings.patch_embedding"
        self.patches = load_patches(loader, name, hidden, shape.patch_size)
        self.patch_bias = loader.tensor(f"{name}.bias", hidden)
        self.positions = loader.tensor(f"{tower}embeddings.position_embedding.weight", shape.side**2, hidden)

        def norm(name: str) -> Compute:
            return LayerNorm.load(loader, name, hidden, shape.eps)

        self.layers = [
            VisionLayer.load(
                loader,
                _LAYER.under(f"{tower}encoder.layers.{i}"),
                hidden,
                shape.intermediate_size,
                shape.num_heads,
                partial(F.gelu, approximate="tanh"),
                norm=norm,
            )
            for i in range(shape.num_layers)
        ]
        self.last_norm = norm(f"{tower}post_layernorm")
        projector = f"{root}multi_modal_projector"
        self.projection_norm = RMSNorm.load(
            loader, f"{projector}.mm_soft_emb_norm", hidden, NormKind(shape.eps, offset=1.0)
        )
        name = f"{projector}.mm_input_projection_weight"
        self.projection = loader.empty(name, decoder_size, hidden)
        loader.read(name, self.projection, (hidden, decoder_size), torch.t)

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, hidden]"""
        x = F.linear(patches.flatten(0, 1), self.patches, self.patch_bias) + self.positions
        for layer in self.layers:
            x = layer(x)
        side, merge = self.shape.side // self.shape.merge, self.shape.merge
        pooled = self.last_norm(x).view(side, merge, side, merge, -1).mean((1, 3)).flatten(0, 1)
        return F.linear(self.projection_norm(pooled), self.projection)
