"""From a text's pooled hidden states to its vector: an embedding, by linear layers and a length of 1, or the logits of classes."""

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
    """A Dense module of sentence-transformers, computed in fp32: its inputs are pooled, and few."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    function: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def load(cls, module: DenseModule, device: torch.device) -> "DenseLayer":
        """Raises CheckpointError."""
        from safetensors import SafetensorError  # for a model that has such a layer alone
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
            raise CheckpointError(f"{file} holds {found}, and the config.json beside it asks for {wanted}")
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
        return cls(
            weight.float().to(device), None if bias is None else bias.float().to(device), _FUNCTIONS[module.activation]
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [texts, inputs] fp32 -> [texts, outputs] fp32"""
        return self.function(F.linear(x, self.weight, self.bias))


class TextHead:
    """The steps of a recipe behind the pooling."""

    def __init__(self, recipe: PoolingRecipe, hidden_size: int, device: torch.device) -> None:
        """Raises CheckpointError where the recipe's layers do not fit one behind the other."""
        size = hidden_size
        for module in recipe.dense:
            if module.inputs != size:
                raise CheckpointError(
                    f"{module.directory / 'config.json'} has in_features = {module.inputs}, and is given {size} numbers"
                )
            size = module.outputs
        self.recipe = recipe
        self._layers = [DenseLayer.load(module, device) for module in recipe.dense]

    def __call__(
        self, pooled: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """pooled [texts, hidden] fp32 -> [texts, numbers] fp32. `logits_of`: the model's own head, which takes rows of `dtype`."""
        classes = self.recipe.classes
        if classes is not None:
            logits = logits_of(pooled.to(dtype)).float()
            return logits if not classes.tokens else compared(logits, classes.tokens)
        for layer in self._layers:
            pooled = layer(pooled)
        return F.normalize(pooled, dim=1) if self.recipe.is_normalized else pooled


def compared(logits: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """logits [texts, vocab] -> [texts, 1], how much likelier the first of the tokens is than the second, in nats; of one alone its logit."""
    chosen = logits[:, list(tokens)]
    return chosen if len(tokens) == 1 else chosen[:, :1] - chosen[:, 1:]
