"""A model, as what runs it sees it, whichever of its stages are here; and its family, as what loads it does."""

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
        """Return the hidden states of every token, normalised: [tokens, hidden]."""

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """[rows, hidden] -> fp32 [rows, vocab], joined where ranks have parts of the vocabulary"""


class Family(NamedTuple):
    """How one architecture is described and laid out."""

    parse_config: Parse
    load: Callable[[Any, WeightLoader, int], Model]  # of its config, a loader and a context length
