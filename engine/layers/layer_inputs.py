"""Inputs of layers besides hidden states (Gemma 4): some numbers of each token for every layer.

They are the sum of a row of a table of tokens and a projection of the token's embedding. The table is larger than all layers of a small model; ranks
divide its tokens, and each rank has all other weights.
"""

import torch

from pilotlight.engine.description.shapes import LayerInputShape, NormKind
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.embedding import TokenEmbedding
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.matrices.weight import GatedActivation

_SHARE = 0.5**0.5  # factor of the sum, which keeps the variance of its two parts


class LayerInputs:
    def __init__(self, table: TokenEmbedding, projection: Linear, norm: RMSNorm, shape: LayerInputShape) -> None:
        self.table = table
        self.projection = projection
        self.norm = norm
        self.shape = shape

    @classmethod
    def load(
        cls, loader: WeightLoader, root: str, hidden_size: int, num_layers: int, shape: LayerInputShape, kind: NormKind
    ) -> "LayerInputs":
        """Load the parts outside the layers. `root`: prefix of the names of their tensors."""
        width, projection = num_layers * shape.size, [f"{root}per_layer_model_projection"]
        return cls(
            TokenEmbedding.load(loader, f"{root}embed_tokens_per_layer", shape.vocab_size, width, shape.size**0.5),
            Linear.load(loader.unshared(), projection, [width], hidden_size, bias=False),
            RMSNorm.load(loader, f"{root}per_layer_projection_norm", shape.size, kind),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the inputs of all layers, [tokens, layers * size], for embeddings x [tokens, hidden]."""
        token_ids = context.batch.token_ids
        if context.images is not None:
            token_ids = token_ids.index_fill(0, context.images.rows, self.shape.pad_token)
        projected = self.projection.plain(x) * x.shape[1] ** -0.5
        normed = self.norm(projected.view(-1, self.shape.size)).view_as(projected)
        return (normed + self.table(token_ids, context)) * _SHARE


class LayerInputGate:
    """The part of a layer that reads its input, gated by the hidden states."""

    def __init__(
        self, gate: Linear, projection: Linear, norm: RMSNorm, activation: GatedActivation, columns: slice
    ) -> None:
        """`columns`: the layer's part of the inputs of all layers."""
        self.gate = gate
        self.projection = projection
        self.norm = norm
        self.activation = activation
        self.columns = columns

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        hidden_size: int,
        layer: int,
        size: int,
        kind: NormKind,
        activation: GatedActivation,
    ) -> "LayerInputGate":
        """Load the part of the layer whose tensor names start with `name`."""
        return cls(
            Linear.load(loader, [f"{name}.per_layer_input_gate"], [size], hidden_size, bias=False),
            Linear.load(loader, [f"{name}.per_layer_projection"], [hidden_size], size, bias=False),
            RMSNorm.load(loader, f"{name}.post_per_layer_input_norm", hidden_size, kind),
            activation,
            slice(layer * size, (layer + 1) * size),
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the summand [tokens, hidden] of hidden states x [tokens, hidden]."""
        assert context.layer_inputs is not None, "the model computes the inputs of its layers"
        both = torch.cat((self.gate(x, context), context.layer_inputs[:, self.columns]), 1)
        return self.norm(self.projection(self.activation(both), context))
