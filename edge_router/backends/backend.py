"""A site as the router sees it: state, round trip, newest status, and requests sent since then.

A Backend combines these facts and reports changes; probing, sending and choosing are in other files.
"""

from collections.abc import Callable

import msgspec

from pilotlight.edge_router.backends.lateness import TOLERANCE, Lateness
from pilotlight.edge_router.backends.probed_state import SLOW_START_S, ProbedState
from pilotlight.edge_router.backends.published_status import PublishedStatus
from pilotlight.edge_router.backends.rtt import RoundTrip
from pilotlight.edge_router.routing.views import BackendView, State
from pilotlight.sites.network import HealthConfig, SiteRef
from pilotlight.wire.hop.status import Place, SiteStatus, SiteView

EJECT_AFTER = 5  # failed attempts in a row
EJECTED_S = 5.0  # duration of the first ejection; each later ejection lasts twice as long, until an attempt succeeds
EJECTED_MAX_S = 60.0
FORGETTING_S = 1.0  # a view of a late site is renewed after this time, because lateness decays


class Backend:
    def __init__(self, site: SiteRef, round_trip: RoundTrip, health: HealthConfig, clock: Callable[[], float]) -> None:
        self.name = site.name
        self.url = site.url
        self.place = Place(site.place.city, site.place.latitude, site.place.longitude)
        self.round_trip = round_trip
        self.published = PublishedStatus()
        self._cordoned = ""  # why this router sends no new requests to the site; empty if it does
        self._health = health
        self._clock = clock
        self.probed = ProbedState(health, clock)
        self.open: set[Ticket] = set()
        self.pending = TicketQueue()  # requests since the site's last status that it has not started to answer
        self.unanswered = TicketQueue()  # requests without an answer yet, with their deadlines
        self.ejection = OutlierEjection(clock)
        self._lateness = Lateness(clock)
        self._view: _CachedView | None = None  # None if something has changed since the last view

    @property
    def state(self) -> State:
        return "draining" if self._cordoned and self.probed.state == "healthy" else self.probed.state

    @property
    def detail(self) -> str:
        """Return the reason for the site's state."""
        return self.probed.detail or self._cordoned

    def cordon(self, reason: str) -> None:
        """Stop sending new requests from this router to the site, or start again if the reason is empty."""
        self._cordoned = reason
        self._view = None

    @property
    def status(self) -> SiteStatus | None:
        return self.published.status

    @property
    def outstanding(self) -> int:
        """Return the number of this router's requests in progress at the site."""
        return len(self.open)

    @property
    def is_in_doubt(self) -> bool:
        """Tell whether the site was healthy and its last probe failed."""
        return self.probed.failures > 0 and self.state == "healthy"

    @property
    def is_frozen(self) -> bool:
        """Tell whether the site is unhealthy because its probes fail.

        A site that answers probes, but is not ready or refuses this router, still serves its open streams.
        """
        return self.state == "unhealthy" and not self.probed.refuses_hops and (self.status is None or self.status.ready)

    def inflight(
        self, tokens: int, on_site_lost: Callable[[str], None] | None = None, expected_ms: float | None = None
    ) -> "Ticket":
        """Return a scope in which a request counts as in progress at the site.

        `on_site_lost` is called with the reason if the site fails before it has answered. `expected_ms` is the predicted time from now to its first
        token; None for an answer in one piece, whose time does not depend on the queue alone.
        """
        now = self._clock()
        late_at = None if expected_ms is None else now + TOLERANCE * expected_ms / 1000
        return Ticket(self, tokens, now, late_at, on_site_lost)

    def begin(self, ticket: "Ticket") -> None:
        self.open.add(ticket)
        self.pending.add(ticket)
        if ticket.late_at is not None:
            self.unanswered.add(ticket)
        self._view = None

    def end(self, ticket: "Ticket", *, is_cancelled: bool) -> None:
        """End a request. A cancelled one, whose client has left, shows nothing about the site."""
        if not (is_cancelled or ticket.has_answered or ticket.is_undecided):
            self.ejection.failed()
        self.open.discard(ticket)
        if ticket.has_answered:
            self._view = None
        else:
            self.settled(ticket)

    def failed_plainly(self) -> None:
        """Count a failure against the site, because another site has answered the same request."""
        self.ejection.failed()
        self._view = None

    def settled(self, ticket: "Ticket") -> None:
        """Remove a request's prompt from the estimated queue of the site."""
        self.pending.remove(ticket)
        self.unanswered.remove(ticket)
        self._view = None

    def first_token(self, expected_ms: float, actual_ms: float) -> None:
        """Record actual against predicted time to first token."""
        self._lateness.observe(expected_ms, actual_ms)
        self._view = None

    def answered(self, status: SiteStatus, asked_at: float) -> None:
        """Record a probe's answer. Requests that were sent before the probe are included in the status."""
        if self.published.take(status, asked_at):
            self.pending.remove_sent_before(asked_at)
        self.probed.answered(status)
        self._view = None

    def declined(self, model: str, queued_tokens: int, asked_at: float) -> None:
        """Record the queue length of a site that declined because its queue is longer than estimated.
        This does not count as a failure."""
        known = self.view().model(model)  # the request may name an alias or an adapter
        if known is not None and self.published.correct_queue(known.name, queued_tokens, asked_at):
            self.pending.remove_sent_before(asked_at)
            self._view = None

    def failed(self, reason: str) -> None:
        """Record that a probe failed or a connection could not be made."""
        is_lost = self.probed.failed(reason)
        self._view = None
        for ticket in tuple(self.open) if is_lost else ():
            if not ticket.has_answered and ticket.on_site_lost is not None:
                ticket.on_site_lost(reason)

    def refused_hop(self, reason: str) -> None:
        """Mark the site as refusing this router's signatures. Requests that it accepted before continue."""
        self.probed.refuses_hops = True
        self.probed.set_state("unhealthy", reason)
        self._view = None

    def refused_draining(self) -> None:
        """Record that the site refused a request because it drains; its next status will show it."""
        self.probed.set_state("draining", "the site is draining")
        self._view = None

    def view(self) -> BackendView:
        """Return a snapshot. It is cached until something changes, or time alone changes a value.
        A decision looks at every site, and most have not changed.
        """
        now, known = self._clock(), self._view
        if known is None or not known.since <= now < known.until or known.view.rtt_ms != self.round_trip.ms:
            known = self._view = self._look(now)
        return known.view

    def published_view(self) -> SiteView:
        return SiteView(self.name, self.url, self.state, round(self.round_trip.ms, 3), self.outstanding, self.status)

    def _look(self, now: float) -> "_CachedView":
        published, pending, ejected_until = self.published, self.pending, self.ejection.until
        stale_at, slow_start = published.at + self._health.stale_after_s, 1.0
        if self.probed.slow_start_until > now:
            slow_start = max(0.0, 1 - (self.probed.slow_start_until - now) / SLOW_START_S)
        first, (unanswered, behind) = pending.oldest, self.unanswered.two_oldest
        late_at, lateness_ms, proven_lateness_ms = _late_at(unanswered), 0.0, 0.0
        if late_at < now or not self._lateness.is_punctual:
            overdue_ms, next_overdue_ms = max(0.0, 1000 * (now - late_at)), max(0.0, 1000 * (now - _late_at(behind)))
            lateness_ms = self._lateness.mean_ms(overdue_ms)
            proven_lateness_ms = self._lateness.proven_ms(overdue_ms, next_overdue_ms)
        view = BackendView(
            name=self.name,
            state=self.state,
            place=self.place,
            rtt_ms=self.round_trip.ms,
            seed_rtt_ms=self.round_trip.seed_ms,
            outstanding=len(self.open),
            pending_requests=len(pending),
            pending_tokens=pending.tokens,
            pending_since_s=first.sent_at if first is not None else 0.0,
            unanswered_tokens=self.unanswered.tokens - unanswered.tokens if unanswered is not None else 0,
            lateness_ms=lateness_ms,
            proven_lateness_ms=proven_lateness_ms,
            backlog_ms=published.backlog_ms,
            status=published.status,
            status_is_fresh=now < stale_at,
            status_at_s=published.at,
            prefixes=published.prefixes,
            is_ejected=now < ejected_until,
            slow_start=slow_start,
        )
        if slow_start < 1 or late_at <= now:  # slow start and lateness change with time alone
            return _CachedView(view, now, until=now)
        until = late_at
        if now < stale_at < until:
            until = stale_at
        if now < ejected_until < until:
            until = ejected_until
        return _CachedView(view, now, until if self._lateness.is_punctual else min(until, now + FORGETTING_S))


def _late_at(ticket: "Ticket | None") -> float:
    return float("inf") if ticket is None or ticket.late_at is None else ticket.late_at


class _CachedView(msgspec.Struct, frozen=True):
    view: BackendView
    since: float
    until: float


class Ticket(msgspec.Struct, eq=False):
    """One request sent to a site, in progress within its scope.
    Until the site starts to answer, its prompt counts in the site's queue, and the request can still go elsewhere."""

    backend: Backend
    tokens: int
    sent_at: float
    # when its answer should have started; None if its duration does not depend on the queue alone
    late_at: float | None
    on_site_lost: Callable[[str], None] | None
    has_answered: bool = False
    is_undecided: bool = False  # the request failed, and whether the site is at fault is not known yet

    def __enter__(self) -> "Ticket":
        self.backend.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.backend.end(self, is_cancelled=kind is not None)

    def answering(self) -> None:
        """Record that the site has started to answer.
        Requests sent before this one no longer count as overdue, either."""
        self.backend.unanswered.remove_through(self)
        self.refused()

    def refused(self) -> None:
        """Record that the site has refused the request, which shows that it is alive."""
        self.has_answered = True
        self.backend.ejection.answered()
        self.backend.settled(self)


class TicketQueue:
    """Tickets in the order of their sending, with the sum of their prompts' tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tickets: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def oldest(self) -> Ticket | None:
        return next(iter(self._tickets), None)

    @property
    def two_oldest(self) -> tuple[Ticket | None, Ticket | None]:
        tickets = iter(self._tickets)
        return next(tickets, None), next(tickets, None)

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        self.tokens += ticket.tokens

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket, if it is in the queue."""
        if ticket in self._tickets:
            del self._tickets[ticket]
            self.tokens -= ticket.tokens

    def remove_through(self, ticket: Ticket) -> None:
        """Remove a ticket and all earlier tickets, if it is in the queue."""
        while ticket in self._tickets:
            self.remove(next(iter(self._tickets)))

    def remove_sent_before(self, time: float) -> None:
        for ticket in [ticket for ticket in self._tickets if ticket.sent_at < time]:
            self.remove(ticket)


class OutlierEjection:
    """Ejects a site whose last answers were failures: it gets no requests for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.until = float("-inf")
        self._clock = clock
        self._failed_in_a_row = 0
        self._ejections_in_a_row = 0

    def answered(self) -> None:
        self._failed_in_a_row = self._ejections_in_a_row = 0

    def failed(self) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= EJECT_AFTER:
            self.until = self._clock() + min(EJECTED_MAX_S, EJECTED_S * 2.0**self._ejections_in_a_row)
            self._ejections_in_a_row = min(self._ejections_in_a_row + 1, 10)
            self._failed_in_a_row = 0
