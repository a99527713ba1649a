"""A drafter with weights, while it is loaded and after it."""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from pilotlight.engine.core.step_runner import Runner
from pilotlight.engine.drafting.model_drafter import ModelDrafter
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.models.model import DraftLayers, Model
from pilotlight.engine.weights.digests import fingerprint
from pilotlight.engine.weights.shard import Shard

# Acceptance rates to assume until drafts have been verified: those that papers report for chat.
_PRIORS = {"draft": 0.6, "eagle3": 0.6, "mtp": 0.7}


class DraftTarget(NamedTuple):
    """The model that a drafter drafts for, and the options of its load."""

    model: Model
    num_caches: int  # number of caches of the model's layers
    context_length: int
    dtype: torch.dtype
    device: torch.device
    shard: Shard  # this rank's part of every layer


class LoadedDrafts(NamedTuple):
    name: str
    layers: DraftLayers
    num_bytes: int

    def drafter(self, runner: Runner, block_size: int) -> ModelDrafter:
        """Return the drafter. `runner`: computes its layers, on this rank or on all ranks."""
        return ModelDrafter(self.name, _PRIORS[self.name], runner, block_size)


class PlannedDrafts(Protocol):
    """A drafter with weights, whose configuration has been read."""

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path | None:
        """Return the directory of its checkpoint; None if it is in the model's."""

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """Return the caches of the drafter's layers, which follow the model's caches."""

    def load(self, target: DraftTarget) -> LoadedDrafts:
        """Load the drafter. Raises CheckpointError."""


def identity_of(planned: PlannedDrafts | None) -> str:
    """Return a string that identifies the drafter whose caches are in a block, "" without a drafter."""
    if planned is None:
        return ""
    return f":{planned.name}" + (f":{fingerprint(planned.directory).hex()}" if planned.directory is not None else "")
