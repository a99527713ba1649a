"""A loaded model: its engine, its place in the arena, and pending moves of its weights."""

from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.lending.lease import Lease, Reservation
from pilotlight.engine.models.model import Model
from pilotlight.engine.parallel.one_rank import OneRank
from pilotlight.engine.weights.relocation import HugePages, Relocation

if TYPE_CHECKING:
    from pilotlight.engine.parallel.ranks import RankGroup


class LoadedModel(NamedTuple):
    spec: ModelSpec
    engine: Engine
    place: Lease | Reservation | None  # None for an encoder, which caches nothing
    under_weights: HugePages | Relocation[Model] | None = None  # a pending move of the memory of its weights
    group: "RankGroup | OneRank" = OneRank()  # the ranks that share the model

    def has_whole_cache(self) -> bool:
        """True if it owns every slab of its cache: other models have returned those that it reserved."""
        return not isinstance(self.place, Reservation) or self.place.is_complete()

    def close(self) -> None:
        """End a model that is no longer used and free its part of the arena."""
        if self.under_weights is not None:
            self.under_weights.close()
        self.engine.close()
        self.group.drop(self.spec.name)
        if self.place is not None:
            self.place.close()
