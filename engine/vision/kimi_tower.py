"""Kimi K2.5's encoder, MoonViT, for still images of any size.

The learned positions are interpolated to the image's patches; 2 x 2 patches become one embedding. Tensors are named as in moonshotai/Kimi-K2.5
(vision_tower, mm_projector). The original also averages over the frames of a video; an image is one frame.
"""

from functools import partial

import torch
import torch.nn.functional as F

from pilotlight.engine.description.vision_config import PatchedVision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.vision.tower import LayerNames, VisionLayer, frequencies, load_patches, stretched, turns_of
from pilotlight.engine.weights.loader import WeightLoader

ROOTS = ("",)
FIRST = "mm_projector.pre_norm.weight"
_LAYER = LayerNames("norm0", ["wqkv"], "wo", "norm1", "mlp.fc0", "mlp.fc1")


class PatchEncoder:
    num_deep = 0

    def __init__(self, shape: PatchedVision, loader: WeightLoader, root: str, decoder_size: int) -> None:
        hidden, tower, projector = shape.hidden_size, f"{root}vision_tower", f"{root}mm_projector"
        self.shape = shape
        self.patches = load_patches(loader, f"{tower}.patch_embed.proj", hidden, shape.patch_size)
        self.patch_bias = loader.tensor(f"{tower}.patch_embed.proj.bias", hidden)
        self.positions = loader.tensor(f"{tower}.patch_embed.pos_emb.weight", *shape.positions, hidden)
        gelu = partial(F.gelu, approximate="tanh")
        self.layers = [
            VisionLayer.load(
                loader,
                _LAYER.under(f"{tower}.encoder.blocks.{i}"),
                hidden,
                shape.intermediate_size,
                shape.num_heads,
                gelu,
            )
            for i in range(shape.num_layers)
        ]
        self.last_norm = LayerNorm.load(loader, f"{tower}.encoder.final_layernorm", hidden, 1e-5)
        self.projection_norm = LayerNorm.load(loader, f"{projector}.pre_norm", hidden, shape.projection_eps)
        joined = hidden * shape.merge**2
        self.projections = [
            Linear.load(loader, [f"{projector}.proj.0"], [joined], joined, bias=True),
            Linear.load(loader, [f"{projector}.proj.2"], [decoder_size], joined, bias=True),
        ]

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode an image: patches [rows, columns, numbers] -> [tokens, hidden]"""
        rows, columns, _ = patches.shape
        x = F.linear(patches.flatten(0, 1), self.patches, self.patch_bias)
        x = x + stretched(self.positions, rows, columns, "bicubic")
        turns = self._turns(rows, columns, x.device)
        for layer in self.layers:
            x = layer(x, turns)
        x = self.projection_norm(self.last_norm(x))
        merge = self.shape.merge
        squares = x.view(rows // merge, merge, columns // merge, merge, -1).transpose(1, 2)
        first, last = self.projections
        return last.plain(F.gelu(first.plain(squares.reshape(rows * columns // merge**2, -1))))

    def _turns(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return the rotations of every patch; rows and columns count from 0.

        A head's pairs are rotated alternately by column and by row.
        """
        by_step = frequencies(self.shape.head_dim, self.shape.theta, device)
        row = torch.arange(rows, device=device).repeat_interleave(columns)
        column = torch.arange(columns, device=device).repeat(rows)
        angles = torch.stack([column, row], 1).float().unsqueeze(1) * by_step.unsqueeze(1)  # [patches, steps, 2]
        return turns_of(angles.flatten(1))
