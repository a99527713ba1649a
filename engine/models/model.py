"""The interfaces of a model (whole, or one pipeline stage) and of its family."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pilotlight.engine.description.config_registry import Parse
from pilotlight.engine.execution.context import Context
from pilotlight.engine.weights.loader import WeightLoader

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class Model(Protocol):
    def forward(self, context: Context) -> torch.Tensor:
        """Return the hidden states of every token, [tokens, hidden], normalised if no stage follows."""

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """Return fp32 logits [rows, vocab] of [rows, hidden], joined if ranks have parts of the vocabulary."""


class DraftLayers(Model, Protocol):
    """The layers of a drafter with weights, whose caches follow the model's."""

    def follow(self, model: Model, context: Context) -> torch.Tensor:
        """Compute a step of the model, and of the drafter beside it.

        Return the result of the model's `forward`.
        """


class Family(NamedTuple):
    """The parser of one architecture's configuration, and its loader."""

    parse_config: Parse
    load: Callable[[Any, WeightLoader, int], Model]  # called with the config, a loader and the context length
