"""A site as the router sees it now: state, round trip, newest status, and what was sent there since that was published.

Holds facts and the rules by which they change; who probes, who sends and who chooses are other files' business.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge_router.policy import BackendView, State
from edge_router.rtt import RoundTrip
from sites.config import HealthConfig, SiteRef
from wire.status import Place, SiteStatus, SiteView

RECOVER_AFTER = 2  # good probes in a row, after which a site that was healthy before and then failed is trusted again


class Ticket:
    """One request on its way to a site. Until the site begins to answer, its prompt stands in the site's queue, and the request can still go
    elsewhere: `on_site_lost` is called when the site fails meanwhile."""

    def __init__(self, backend: "Backend", tokens: int, sent_at: float) -> None:
        self.tokens = tokens
        self.sent_at = sent_at
        self.on_site_lost: Callable[[], None] | None = None
        self._backend = backend

    @property
    def detail(self) -> str:
        """Why the site's state is what it is."""
        return self._backend.detail

    def answering(self) -> None:
        self._backend._settle(self)
        self._backend._waiting.discard(self)


class Backend:
    def __init__(self, site: SiteRef, round_trip: RoundTrip, health: HealthConfig, clock: Callable[[], float]) -> None:
        self.name = site.name
        self.url = site.url
        self.place = Place(site.place.city, site.place.latitude, site.place.longitude)
        self.round_trip = round_trip
        self.state: State = "unknown"
        self.detail = "not yet asked"  # why the state is what it is
        self.status: SiteStatus | None = None
        self.outstanding = 0
        self._status_at = float("-inf")
        self._health = health
        self._clock = clock
        self._failures = 0
        self._successes = 0
        self._was_healthy = False
        self._pending: dict[Ticket, None] = {}  # in the order they were sent
        self._pending_tokens = 0
        self._waiting: set[Ticket] = set()  # nothing has come back yet

    @property
    def was_ever_healthy(self) -> bool:
        return self._was_healthy

    @contextmanager
    def inflight(self, tokens: int) -> Iterator[Ticket]:
        ticket = Ticket(self, tokens, self._clock())
        self.outstanding += 1
        self._pending[ticket] = None
        self._pending_tokens += tokens
        self._waiting.add(ticket)
        try:
            yield ticket
        finally:
            self.outstanding -= 1
            ticket.answering()

    def answered(self, status: SiteStatus, asked_at: float) -> None:
        """A probe came back. What was sent before the probe was asked is in the status itself."""
        self._failures = 0
        if not self._is_older(status):
            self.status, self._status_at = status, asked_at
            for ticket in [ticket for ticket in self._pending if ticket.sent_at < asked_at]:
                self._settle(ticket)
        if status.draining:
            self._become("draining", "the site is draining")
        elif not status.ready:
            self._become("unhealthy", "the site says that it is not ready")
        else:
            self._successes += 1
            flapping = self.state == "unhealthy" and self._was_healthy
            if not flapping or self._successes >= RECOVER_AFTER:
                self._become("healthy", "")
                self._was_healthy = True

    def failed(self, reason: str) -> None:
        """A probe failed, or a connection could not be made."""
        self._failures += 1
        self._successes = 0
        if self._failures >= self._health.unhealthy_after:
            self._become("unhealthy", reason)
            for ticket in tuple(self._waiting):
                if ticket.on_site_lost is not None:
                    ticket.on_site_lost()

    def refused_draining(self) -> None:
        """The site refused a request because it drains; its next status will say the same."""
        self._become("draining", "the site is draining")

    def view(self) -> BackendView:
        return BackendView(
            name=self.name,
            state=self.state,
            place=self.place,
            rtt_ms=self.round_trip.ms,
            seed_rtt_ms=self.round_trip.seed_ms,
            outstanding=self.outstanding,
            pending_requests=len(self._pending),
            pending_tokens=self._pending_tokens,
            status=self.status,
            status_is_fresh=self._clock() - self._status_at <= self._health.stale_after_s,
        )

    def published_view(self) -> SiteView:
        return SiteView(self.name, self.url, self.state, round(self.round_trip.ms, 3), self.outstanding, self.status)

    def _become(self, state: State, detail: str) -> None:
        if state != "healthy":
            self._successes = 0
        self.state, self.detail = state, detail

    def _is_older(self, status: SiteStatus) -> bool:
        """Answers may overtake each other; a restarted site counts from one again and has another process id."""
        known = self.status
        return known is not None and _pid(known) == _pid(status) and status.sequence < known.sequence

    def _settle(self, ticket: Ticket) -> None:
        if ticket in self._pending:
            del self._pending[ticket]
            self._pending_tokens -= ticket.tokens


def _pid(status: SiteStatus) -> int | None:
    return next((process.pid for process in status.processes if process.role == "site"), None)
