"""Carries out what scaling.py decides: wakes a hot model on one more device that has room, and lets a copy sleep when the others do without it.

A further copy's weights come from the host memory where the first one's lie, not from the checkpoint. It never puts anybody to sleep for it; whoever
needs its room later gets it before anybody's only copy (copies.py). A copy that goes takes no new sequences, and sleeps when its last has ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from runtime.engines.copies import Copy
from runtime.engines.room import News, Room
from runtime.engines.scaling import Heat
from runtime.engines.slot import RETRY_FAILED_S, Slot
from runtime.engines.wakes import Waker
from sites.site import EngineConfig

log = logging.getLogger("pilotlight.models")

LOOK_EVERY_S = 0.5  # as often as an idle host says how it is

Observer = Callable[[str, str], None]  # (model, "up" or "down")


class Autoscaler:
    def __init__(
        self,
        slots: Sequence[Slot],
        rooms: Sequence[Room],
        waker: Waker,
        news: News,
        config: EngineConfig,
        observe: Observer,
    ) -> None:
        self._heats = [(slot, Heat(config.scale_up_wait_s, config.scale_down_after_s)) for slot in slots]
        self._rooms = rooms
        self._waker = waker
        self._news = news
        self._max_num_seqs = config.max_num_seqs
        self._observe = observe

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                for slot, heat in self._heats:
                    await self._look(slot, heat)
            except Exception:  # whatever it is, the site goes on with the copies it has
                log.exception("looking whether a model needs more devices")

    async def _look(self, slot: Slot, heat: Heat) -> None:
        for copy in slot.awake:
            if copy.is_retiring and not copy.is_busy:
                await self._rooms[copy.host.index].put_to_sleep(copy)
        taking = [copy for copy in slot.awake if copy.is_live and not copy.is_retiring]
        match heat.judge(time.monotonic(), [copy.load for copy in taking], self._max_num_seqs):
            case "more":
                self._add(slot)
            case "less":
                self._retire(taking)

    def _add(self, slot: Slot) -> None:
        if retiring := [copy for copy in slot.awake if copy.is_retiring]:
            retiring[0].is_retiring = False  # it has what it needs still
            self._news.tell()
            return
        free = [copy for copy in slot.copies if not copy.is_awake and copy.task is None and copy.host.why_down is None]
        fits = [found for copy in free if (found := self._rooms[copy.host.index].suitability(copy)).crowding == 0]
        if not fits or slot.waking or time.monotonic() - slot.failed_at < RETRY_FAILED_S:
            return
        copy = slot.copies[min(fits).device_index]
        log.info("model %s is hot and wakes on %s as well", slot.config.name, copy.host.device)
        self._observe(slot.config.name, "up")
        self._waker.begin(copy)

    def _retire(self, copies: Sequence[Copy]) -> None:
        """The one that is done soonest; of equals the one that came last."""
        copy = min(copies, key=lambda copy: (copy.work.sequences, -copy.awake_since))
        log.info("model %s has a copy too many: the one on %s goes", copy.slot.config.name, copy.host.device)
        self._observe(copy.slot.config.name, "down")
        copy.is_retiring = True
