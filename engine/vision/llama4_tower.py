"""Llama 4's encoder: square tiles, encoded separately, with one token for each whole tile.

Four neighbouring patches become one embedding. Tensors are named as in meta-llama/Llama-4-Scout-17B-16E-Instruct (vision_model,
multi_modal_projector).
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.description.vision_config import TiledVision
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.vision.tower import LayerNames, VisionLayer, frequencies, turns_of
from pilotlight.engine.weights.loader import WeightLoader

_ROOT = "vision_model"
_LAYER = LayerNames(
    "input_layernorm",
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.fc1",
    "mlp.fc2",
)


class TileEncoder:
    num_deep = 0

    def __init__(self, shape: TiledVision, loader: WeightLoader, decoder_size: int) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.shape = shape
        self.patches = Linear.load(
            loader, [f"{_ROOT}.patch_embedding.linear"], [hidden], 3 * shape.patch_size**2, bias=False
        )
        self.whole = loader.tensor(f"{_ROOT}.class_embedding", hidden)
        self.positions = loader.tensor(f"{_ROOT}.positional_embedding_vlm", shape.side**2 + 1, hidden)
        self.first_norm = LayerNorm.load(loader, f"{_ROOT}.layernorm_pre", hidden, 1e-5)
        self.layers = [
            VisionLayer.load(loader, _LAYER.under(f"{_ROOT}.model.layers.{i}"), hidden, inner, shape.num_heads)
            for i in range(shape.num_layers)
        ]
        self.last_norm = LayerNorm.load(loader, f"{_ROOT}.layernorm_post", hidden, 1e-5)
        adapter = f"{_ROOT}.vision_adapter.mlp"
        self.projections = [
            Linear.load(loader, [f"{adapter}.fc1"], [shape.joined_size], inner, bias=False),
            Linear.load(loader, [f"{adapter}.fc2"], [shape.output_size], shape.joined_size, bias=False),
            Linear.load(loader, ["multi_modal_projector.linear_1"], [decoder_size], shape.output_size, bias=False),
        ]

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode a tile: patches [side, side, numbers] -> [tokens, hidden]"""
        x = torch.cat([self.patches.plain(patches.flatten(0, 1)), self.whole.unsqueeze(0)])
        x = self.first_norm(x + self.positions)
        turns = self._turns(x.device)
        for layer in self.layers:
            x = layer(x, turns)
        x = _joined(self.last_norm(x)[:-1].view(self.shape.side, self.shape.side, -1), self.shape.merge)
        first, second, last = self.projections
        return last.plain(F.gelu(second.plain(F.gelu(first.plain(x)))))

    def _turns(self, device: torch.device) -> torch.Tensor:
        """Return the rotations of every patch, and of the tile's own token, which is not rotated.

        Rows and columns count from 1. The first half of a head's pairs is rotated by column, the second by row.
        """
        steps = torch.arange(1, self.shape.side + 1, device=device).float().unsqueeze(1)
        angles = steps * frequencies(self.shape.head_dim, self.shape.theta, device)
        side = self.shape.side
        by_column, by_row = angles.repeat(side, 1), angles.repeat_interleave(side, 0)
        found = torch.cat([by_column, by_row], 1)
        return turns_of(torch.cat([found, found.new_zeros(1, found.shape[1])]))


def _joined(x: torch.Tensor, merge: int) -> torch.Tensor:
    """Join squares of neighbouring patches.

    x [rows, columns, hidden] -> [rows * columns / merge**2, hidden * merge**2]
    """
    rows, columns, hidden = x.shape
    squares = x.view(rows // merge, merge, columns // merge, merge, hidden).transpose(1, 2)
    return squares.reshape(-1, merge * merge * hidden)
