"""The result for a text's pooled hidden states: a normalised embedding, or logits of classes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.pooling_recipe import DenseModule, PoolingRecipe

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x, "Tanh": torch.tanh, "ReLU": F.relu, "GELU": F.gelu, "SiLU": F.silu,
}  # fmt: skip


class DenseLayer(NamedTuple):
    """A Dense module of sentence-transformers, computed in fp32, which is cheap for few pooled vectors."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    function: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def load(cls, module: DenseModule, device: torch.device) -> "DenseLayer":
        """Load the layer's weights. Raises CheckpointError."""
        from safetensors import SafetensorError  # imported here: few models have such a layer
        from safetensors.torch import load_file

        file = module.directory / "model.safetensors"
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
        if module.has_bias:
            wanted["linear.bias"] = (module.outputs,)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != wanted:
            raise CheckpointError(f"{file} holds {found}, but the config.json beside it requires {wanted}")
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
        return cls(
            weight.float().to(device), None if bias is None else bias.float().to(device), _FUNCTIONS[module.activation]
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [texts, inputs] fp32; return [texts, outputs] fp32."""
        return self.function(F.linear(x, self.weight, self.bias))


class TextHead:
    """The computation after pooling: dense layers and normalisation, or logits of classes."""

    def __init__(self, recipe: PoolingRecipe, hidden_size: int, device: torch.device) -> None:
        """Load the recipe's layers. Raises CheckpointError if their sizes do not match each other."""
        size = hidden_size
        for module in recipe.dense:
            if module.inputs != size:
                raise CheckpointError(
                    f"{module.directory / 'config.json'} has in_features = {module.inputs}, but its input has {size} numbers"
                )
            size = module.outputs
        self.recipe = recipe
        self._layers = [DenseLayer.load(module, device) for module in recipe.dense]

    def __call__(
        self, pooled: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return [texts, numbers] fp32 for pooled [texts, hidden] fp32.

        `logits_of`: the model's own head, which takes rows of `dtype`.
        """
        classes = self.recipe.classes
        if classes is not None:
            logits = logits_of(pooled.to(dtype)).float()
            return logits if not classes.tokens else compared(logits, classes.tokens)
        for layer in self._layers:
            pooled = layer(pooled)
        return F.normalize(pooled, dim=1) if self.recipe.is_normalized else pooled


def compared(logits: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the logit of the first token minus that of the second, [texts, 1].

    With one token, return its logit. `logits` [texts, vocab].
    """
    chosen = logits[:, list(tokens)]
    return chosen if len(tokens) == 1 else chosen[:, :1] - chosen[:, 1:]
