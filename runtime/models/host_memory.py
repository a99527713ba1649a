"""The site's host memory for weights: files of sleeping models are evicted for a new file.

All engine hosts of the site share the files. residency.py decides, weights_tier.py stores; this module connects them.
"""

import logging
from collections.abc import Callable, Collection

from pilotlight.runtime.hosts.memory import gib
from pilotlight.runtime.models.model_state import ModelState
from pilotlight.runtime.models.residency import make_room
from pilotlight.runtime.models.weights_tier import WeightsTier

log = logging.getLogger("pilotlight.models")


class HostMemory:
    def __init__(self, states: Collection[ModelState], tier: WeightsTier | None, clock: Callable[[], float]) -> None:
        """`states` is a view of the models, which may change."""
        self._states = states
        self._tier = tier
        self._clock = clock

    def file_for(self, state: ModelState) -> str | None:
        """Return the path for the model's weights, after evicting sleeping models if necessary.
        None if there is not enough room or no tier, or if the model's residency is `disk`."""
        tier, name = self._tier, state.name
        if tier is None or state.config.residency == "disk":
            return None
        others = [other for other in self._states if other is not state]
        now = self._clock()
        held = [other.host_memory_candidate(now, size) for other in others if (size := tier.held_for(other.name))]
        plan = make_room(max(state.num_bytes, tier.held_for(name)), tier.limit_bytes, held)
        if not plan.is_possible:
            log.info(
                "%s has no place among the weights in host memory (%s of %s are in use)",
                name, gib(sum(each.num_bytes for each in held)), gib(tier.limit_bytes),
            )  # fmt: skip
            return None
        for victim in plan.evict:
            log.info("%s leaves host memory for %s", victim, name)
            tier.remove(victim)
        return str(tier.file_of(name))

    def remove(self, name: str) -> None:
        """Remove the file of a model that the site no longer serves."""
        if self._tier is not None:
            self._tier.remove(name)
