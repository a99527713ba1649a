"""What the parts of a model see of the forward pass that they compute: one value, which every part is called with; there are no globals.

Knows the batch and where the layers keep it; refuses to know which parts a model has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from pilotlight.engine.adapters.rows import AdapterRows
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.state_places import StatePlaces
from pilotlight.engine.kv.pool.layout import LayerCache

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class ImageRows(NamedTuple):
    """Tokens of a step that images stand for."""

    rows: torch.Tensor  # [tokens] int64, among the step's
    embeddings: torch.Tensor  # [tokens, hidden]


@dataclass(frozen=True, slots=True)
class Context:
    batch: Batch
    caches: Sequence[LayerCache] = ()  # of the layers that keep something of each token
    # cos and sin of the positions, by each of the model's rotary rules
    turns: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    temperatures: torch.Tensor | None = None  # [tokens, 1, 1], what queries are multiplied by
    states: Mapping[int, StatePlaces] = field(default_factory=dict)  # of the groups of layers that keep states
    images: ImageRows | None = None  # None: the step has no images
    ranks: "Communicator | None" = None  # that have other parts of the model's weights
    adapters: AdapterRows | None = None  # None: no token of the step has one
    # [tokens, hidden], what the stage before has made of the batch; None: this is the first
    incoming: torch.Tensor | None = None

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks have made of their parts."""
        return x if self.ranks is None else self.ranks.sum(x)
