"""The context of one forward pass: a value passed to every part of a model, instead of globals.

It contains the batch and its places in the layers' caches, and does not depend on the parts of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from pilotlight.engine.adapters.rows import AdapterRows
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.kernels.state.state_batch import StateBatch

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class ImageRows(NamedTuple):
    """The tokens of a step that represent images."""

    rows: torch.Tensor  # [tokens] int64, indices among the step's tokens
    # [tokens, hidden], or several times as wide: the additional columns are added after the first layers; None on a later pipeline stage
    embeddings: torch.Tensor | None
    # [2, tokens] int64, the row and column of each token in its image; None if images are not rotated by row and column
    places: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Context:
    batch: Batch
    caches: Sequence[LayerCache] = ()  # one per layer that caches something per token
    # cos and sin of the positions, for each of the model's rotary rules
    turns: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    temperatures: torch.Tensor | None = None  # [tokens, 1, 1], factor of the queries
    layer_inputs: torch.Tensor | None = None  # [tokens, layers * size], inputs of layers besides hidden states
    images: ImageRows | None = None  # None if the step has no images
    ranks: "Communicator | None" = None  # ranks that hold other parts of the model's weights
    adapters: AdapterRows | None = None  # None if no token of the step has an adapter
    # [tokens, hidden], the output of the previous pipeline stage; None at the first stage
    incoming: torch.Tensor | None = None
    # of the decodes and the prompts: the positions [tokens, top_k] that the last layer with an index of keys has selected; None for all
    selected: list[torch.Tensor | None] = field(default_factory=list)

    def states_of(self, cache: LayerCache) -> StateBatch:
        """Return the places of the states of a layer that keeps states."""
        states = self.batch.groups[cache.group].states
        assert states is not None, "the layer's group keeps no states"
        return states

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' partial results."""
        return x if self.ranks is None else self.ranks.sum(x)
