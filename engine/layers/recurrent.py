"""Loads layers that mix tokens by a recurrent state, alone or beside attention."""

from typing import NamedTuple

import torch

from pilotlight.engine.description.recurrent_shapes import DeltaShape, KimiDeltaShape, MambaShape, RecurrentShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.delta_net import GatedDeltaNet, KimiDeltaAttention
from pilotlight.engine.layers.mamba import Mamba
from pilotlight.engine.layers.short_conv import ShortConv
from pilotlight.engine.weights.loader import WeightLoader

Recurrent = ShortConv | GatedDeltaNet | KimiDeltaAttention | Mamba


class JoinedMixers(NamedTuple):
    """Attention and a recurrent mixer with the same input, whose outputs are added (Falcon-H1)."""

    attention: Attention
    recurrent: Recurrent
    scales: tuple[
        float, float, float, float
    ]  # factors of the input and output of attention, then of the recurrent mixer

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        seen, attended, given, mixed = self.scales
        return self.attention(x * seen, context) * attended + self.recurrent(x * given, context) * mixed


def load_recurrent(loader: WeightLoader, layer_name: str, hidden_size: int, shape: RecurrentShape) -> Recurrent:
    """Load the token mixer of a layer; its shape determines the class.

    `layer_name`: prefix of the names of its tensors. Raises CheckpointError if the ranks cannot share its heads.
    """
    if isinstance(shape, DeltaShape):
        return GatedDeltaNet.load(loader, layer_name, hidden_size, shape)
    if isinstance(shape, KimiDeltaShape):
        return KimiDeltaAttention.load(loader, layer_name, hidden_size, shape)
    if isinstance(shape, MambaShape):
        return Mamba.load(loader, layer_name, hidden_size, shape)
    return ShortConv.load(loader, layer_name, hidden_size, shape)
