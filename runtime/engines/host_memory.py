"""Which models' weights may lie in the site's host memory: a sleeping model's file gives way to one that is about to be written.

All engine hosts of the site share the files. Decisions are residency.py's, files weights_tier.py's; this joins them.
"""

import logging
from collections.abc import Callable, Iterable

from runtime.engines.memory import gib
from runtime.engines.residency import make_room
from runtime.engines.slot import Slot
from runtime.engines.weights_tier import WeightsTier

log = logging.getLogger("pilotlight.models")


class HostMemory:
    def __init__(self, slots: Iterable[Slot], tier: WeightsTier | None, clock: Callable[[], float]) -> None:
        self._slots = tuple(slots)
        self._tier = tier
        self._clock = clock

    def holds(self, slot: Slot) -> bool:
        return self._tier is not None and self._tier.bytes_of(slot.config.name) > 0

    def file_for(self, slot: Slot) -> str | None:
        """Where its weights may lie; sleeping models' files give way. None: it has no place there."""
        tier, name = self._tier, slot.config.name
        if tier is None or slot.config.residency == "disk":
            return None
        others = [other for other in self._slots if other is not slot]
        now = self._clock()
        held = [other.standing_in_memory(now, size) for other in others if (size := tier.held_for(other.config.name))]
        plan = make_room(max(slot.num_bytes, tier.held_for(name)), tier.limit_bytes, held)
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
