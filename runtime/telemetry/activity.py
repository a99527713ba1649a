"""The activity of a site without a router, for its page (page/source.py).

It reads the counters of other modules once a second."""

from collections.abc import Callable
from typing import Literal

from pilotlight.page.counters import times_of, total, totals_by
from pilotlight.page.source import Counts, Decision, Move, SiteRow, in_steps, shown
from pilotlight.runtime.telemetry.metrics import RequestMetrics
from pilotlight.wire.hop.status import SiteStatus


class SiteActivity:
    def __init__(self, status: Callable[[], SiteStatus], requests: RequestMetrics) -> None:
        self._status = status
        self._requests = requests
        first = status()
        self.name, self.place, self.version = first.site, first.place, first.version

    def counts(self) -> Counts:
        requests, status = self._requests, self._status()
        return Counts(
            requests=totals_by(requests.ended, "outcome"),
            tokens=total(requests.output),
            prompt_tokens=total(requests.prompt),
            cached_tokens=total(requests.cached),
            first_token=times_of(requests.ttft),
            token_gaps=times_of(requests.itl),
            running=status.inflight,
            waiting=sum(model.waiting for model in status.models),
        )

    def sites(self) -> tuple[SiteRow, ...]:
        status = self._status()
        state: Literal["healthy", "unhealthy", "draining"]
        state = "draining" if status.draining else "healthy" if status.ready else "unhealthy"
        return (
            SiteRow(
                status.site, state, "", status.version, status.place, None, status.inflight, status.inflight,
                status.max_inflight, tuple(map(shown, status.models)), status.processes, status.functions,
                in_steps(status.uptime_s),
            ),
        )  # fmt: skip

    def moves(self) -> tuple[Move, ...]:
        return ()

    def decisions(self) -> tuple[Decision, ...]:
        return ()
