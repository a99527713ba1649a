"""Mistral 3's encoder, Pixtral, for still images of any size.

2 x 2 patches become one embedding. Tensors are named as in mistralai/Mistral-Small-3.1-24B-Instruct-2503 (vision_tower, multi_modal_projector).
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.description.vision_config import PixtralVision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.vision.tower import Compute, LayerNames, VisionLayer, load_patches, turns_by_place
from pilotlight.engine.weights.loader import WeightLoader

_NORM = NormKind(1e-5)
ROOTS = ("", "model.")
FIRST = "vision_tower.patch_conv.weight"
_LAYER = LayerNames(
    "attention_norm",
    ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    "attention.o_proj",
    "ffn_norm",
    "feed_forward.up_proj",
    "feed_forward.down_proj",
    "feed_forward.gate_proj",
)


class PixtralEncoder:
    num_deep = 0

    def __init__(self, shape: PixtralVision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden = shape.hidden_size
        tower, projector = f"{root}vision_tower", f"{root}multi_modal_projector"
        self.shape = shape
        self.patches = load_patches(loader, f"{tower}.patch_conv", hidden, shape.patch_size)

        def norm(name: str) -> Compute:
            return RMSNorm.load(loader, name, hidden, _NORM)

        self.first_norm = norm(f"{tower}.ln_pre")
        self.layers = [
            VisionLayer.load(
                loader,
                _LAYER.under(f"{tower}.transformer.layers.{i}"),
                hidden,
                shape.intermediate_size,
                shape.num_heads,
                F.silu if shape.activation == "silu" else F.gelu,
                norm=norm,
                bias=False,
                turns_halves=True,
            )
            for i in range(shape.num_layers)
        ]
        self.last_norm = RMSNorm.load(loader, f"{projector}.norm", hidden, NormKind(shape.eps))
        joined = hidden * shape.merge**2
        self.joined = Linear.load(loader, [f"{projector}.patch_merger.merging_layer"], [hidden], joined, bias=False)
        self.projections = [
            Linear.load(loader, [f"{projector}.{name}"], [decoder_size], columns, bias=shape.has_bias)
            for name, columns in (("linear_1", hidden), ("linear_2", decoder_size))
        ]

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, hidden]"""
        rows, columns, _ = patches.shape
        x = self.first_norm(F.linear(patches.flatten(0, 1), self.patches))
        steps = torch.arange(0, self.shape.head_dim, 2, device=x.device).float() / self.shape.head_dim
        by_step = 1.0 / (self.shape.theta**steps)
        turns = turns_by_place(rows, columns, by_step[0::2], by_step[1::2])
        for layer in self.layers:
            x = layer(x, turns)
        merge = self.shape.merge
        squares = self.last_norm(x).view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        first, last = self.projections
        return last.plain(F.gelu(first.plain(self.joined.plain(squares.reshape(-1, merge**2 * x.shape[1])))))
