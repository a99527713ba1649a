"""What mixes tokens by a state in attention's place, by its description."""

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.recurrent_shapes import DeltaShape, MambaShape, RecurrentShape
from pilotlight.engine.layers.delta_net import GatedDeltaNet
from pilotlight.engine.layers.mamba import Mamba
from pilotlight.engine.layers.short_conv import ShortConv
from pilotlight.engine.weights.loader import WeightLoader


def load_recurrent(
    loader: WeightLoader, layer_name: str, hidden_size: int, shape: RecurrentShape
) -> ShortConv | GatedDeltaNet | Mamba:
    """Load the part of a layer whose tensors begin with `layer_name`. Raises CheckpointError on one of several ranks."""
    if loader.shard.size > 1:
        raise CheckpointError(f"{layer_name} keeps a state, which {loader.shard.size} ranks cannot share")
    if isinstance(shape, DeltaShape):
        return GatedDeltaNet.load(loader, layer_name, hidden_size, shape)
    if isinstance(shape, MambaShape):
        return Mamba.load(loader, layer_name, hidden_size, shape)
    return ShortConv.load(loader, layer_name, hidden_size, shape)
