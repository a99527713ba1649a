"""SiteClocks: each site's clock relative to this router's, so that sites accept its signatures."""

import logging
import time
from collections.abc import Callable, Sequence

from pilotlight.wire.hop.headers import HOP_MAX_AGE_S, told_clock

log = logging.getLogger("pilotlight.edge_router.backends.health")


class SiteClocks:
    def __init__(self, sites: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._ahead_s = dict.fromkeys(sites, 0.0)
        self._clock = clock

    def now_s(self, site: str) -> float:
        """Return the seconds since the epoch by the site's clock."""
        return self._clock() + self._ahead_s.get(site, 0.0)

    def times_s(self) -> list[float]:
        """Return the time by this router's clock, then by each site's clock that differs from it."""
        now_s = self._clock()
        return [now_s, *(now_s + ahead_s for ahead_s in self._ahead_s.values() if ahead_s)]

    def learns(self, refusal: str, told: str, secret: str, site: str, request_id: str) -> bool:
        """Record the clock of a site that has refused a signature; return whether to send the request again.
        The arguments are the values of its headers REFUSAL and CLOCK. Such a refusal means that a clock was set since the last probe."""
        told_s = told_clock(told, secret, site, request_id) if refusal == "clock" and secret else None
        if told_s is not None:
            self.record(site, told_s)
        return told_s is not None

    def record(self, site: str, time_s: float) -> None:
        """Record the time of a site's clock, and log how much it differs."""
        ahead_s = time_s - self._clock()
        # a smaller difference may be rounding, because timestamps are whole seconds
        self._ahead_s[site] = ahead_s if abs(ahead_s) > 1 else 0.0
        when = "ahead of" if ahead_s > 0 else "behind"
        log.warning("site %s's clock is %.0f s %s this router's: set the wrong one", site, abs(ahead_s), when)
        all_ahead_s = self._ahead_s.values()
        if len(all_ahead_s) > 1 and all(all_ahead_s) and max(all_ahead_s) - min(all_ahead_s) < HOP_MAX_AGE_S:
            log.error("this router's own clock differs from every site's by %.0f s: set it", abs(ahead_s))
