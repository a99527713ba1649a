"""Loads layers that mix tokens by a recurrent state."""

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.recurrent_shapes import DeltaShape, MambaShape, RecurrentShape
from pilotlight.engine.layers.delta_net import GatedDeltaNet
from pilotlight.engine.layers.mamba import Mamba
from pilotlight.engine.layers.short_conv import ShortConv
from pilotlight.engine.weights.loader import WeightLoader


def load_recurrent(
    loader: WeightLoader, layer_name: str, hidden_size: int, shape: RecurrentShape
) -> ShortConv | GatedDeltaNet | Mamba:
    """Load the token mixer of a layer; its shape determines the class.

    `layer_name`: prefix of the names of its tensors. Raises CheckpointError if several ranks share the layer.
    """
    if loader.shard.size > 1:
        raise CheckpointError(f"{layer_name} keeps a state, which {loader.shard.size} ranks cannot share")
    if isinstance(shape, DeltaShape):
        return GatedDeltaNet.load(loader, layer_name, hidden_size, shape)
    if isinstance(shape, MambaShape):
        return Mamba.load(loader, layer_name, hidden_size, shape)
    return ShortConv.load(loader, layer_name, hidden_size, shape)
