"""Hints to sites that a sleeping model was wanted, so that the next request finds it awake.

wire/hop/management.py has the message.

A site gets a hint if it would have won without the cost of waking the model; the request itself is answered elsewhere. Hints are sent in the
background: a lost hint does no harm.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter

from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.edge_router.routing.views import Preference
from pilotlight.wire.errors import message_of
from pilotlight.wire.hop.management import WAKE_PATH, WakeHint

# Seconds between hints for one model at one site: longer than most wakes, so that the next status shows the effect.
EVERY_S = 5.0
MAX_UNDER_WAY = 16  # hints in progress; beyond this number hints are dropped, so that sites that do not answer do not fill the memory
ASLEEP = ("host", "disk")

log = logging.getLogger(__name__)


class WakeHints:
    """Use as `async with`; leaving the scope cancels hints in progress."""

    def __init__(
        self, orders: SiteControl, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._orders = orders
        self._clock = clock
        self._told_at: dict[tuple[str, str], float] = {}  # time of the last hint by site and model
        self._under_way: set[asyncio.Task[None]] = set()
        self._hints = Counter(
            "pilotlight_router_wake_hints", "Wake hints sent to sites with a wanted, sleeping model, by outcome: heeded, refused, failed or dropped.",
            ["site", "outcome"], registry=registry,
        )  # fmt: skip

    async def __aenter__(self) -> "WakeHints":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def consider(self, model: str | None, preferences: Sequence[Preference]) -> None:
        """Consider the preferences of a decision, best first, and send a hint if one is due. Returns at once."""
        found = sleeping_winner(model, preferences)
        if found is None:
            return
        site, name = found
        now = self._clock()
        if now - self._told_at.get((site, name), float("-inf")) < EVERY_S:
            return
        if len(self._under_way) >= MAX_UNDER_WAY:
            self._hints.labels(site, "dropped").inc()
            return
        self._told_at[site, name] = now
        task = asyncio.create_task(self._tell(site, name), name=f"hint {site} {name}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _tell(self, site: str, model: str) -> None:
        answered = await self._orders.exchange("POST", site, WAKE_PATH, msgspec.json.encode(WakeHint(model)))
        outcome = "failed" if not answered.status else "heeded" if answered.status < 300 else "refused"
        if outcome == "refused":
            log.warning("site %s refused the hint to wake %s with status %d", site, model, answered.status)
        elif outcome == "failed":
            log.info("site %s could not be asked to wake %s: %s", site, model, message_of(answered.body))
        self._hints.labels(site, outcome).inc()


def sleeping_winner(model: str | None, preferences: Sequence[Preference]) -> tuple[str, str] | None:
    """Return the site, and the model's name there, that would have won if the model were awake.

    Return None if the decision would be the same.
    """
    if model is None:
        return None
    chosen, *others = preferences
    best, winner = chosen.cost_ms, None
    for preference in others:
        wake_ms = preference.terms.get("wake", 0.0)
        if wake_ms <= 0 or preference.cost_ms - wake_ms >= best:
            continue
        status = preference.backend.model(model)
        if status is not None and status.residency in ASLEEP:
            best, winner = preference.cost_ms - wake_ms, (preference.backend.name, status.name)
    return winner
