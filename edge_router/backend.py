"""A site as the router sees it now: state, round trip, newest status, and what was sent there since that was published.

Holds facts and the rules by which they change; who probes, who sends and who chooses are other files' business.
"""

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from msgspec.structs import replace

from edge_router.lateness import TOLERANCE, Lateness
from edge_router.policy import BackendView, State
from edge_router.rtt import RoundTrip
from sites.network import HealthConfig, SiteRef
from wire.prefixes import apply_changes
from wire.status import Place, SiteStatus, SiteView

EJECT_AFTER = 5  # tries in a row that brought no answer; a full site that refuses politely counts too: it is given time
EJECTED_S = 5.0  # the first time; twice as long each further time, while nothing but failures follow
EJECTED_MAX_S = 60.0
FORGETTING_S = 1.0  # for so long the lateness that was seen counts as unchanged
SLOW_START_S = 10.0  # after an outage: a site with an empty queue and an empty cache must not draw everybody at once
RECOVER_AFTER = 2  # good probes in a row, after which a site that was healthy before and then failed is trusted again


class Ticket:
    """One request on its way to a site, from its making until its scope is left. Until the site begins to answer, its prompt stands in the site's
    queue, and the request can still go elsewhere: `on_site_lost` is called, with the reason, when the site fails meanwhile."""

    def __init__(
        self,
        requests: "InflightRequests",
        ejection: "OutlierEjection",
        tokens: int,
        sent_at: float,
        on_site_lost: Callable[[str], None] | None,
        expected_ms: float | None,
    ) -> None:
        """`expected_ms`: from now to its first token; None: how long it takes says nothing about the queue, as with an answer in one piece."""
        self.tokens = tokens
        self.sent_at = sent_at
        self.expected_ms = expected_ms
        self.has_answered = False
        self.on_site_lost = on_site_lost
        self._requests = requests
        self._ejection = ejection
        requests.add(self)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and not self.has_answered:  # nothing came: a client that leaves ends the scope by an exception
            self._ejection.failed()
        self._requests.remove(self)

    def answering(self) -> None:
        """The site has begun to answer."""
        self._requests.overtake(self)
        self.refused()

    def refused(self) -> None:
        """The site has said something, if only that it will not: nothing is wrong with it."""
        self.has_answered = True
        self._ejection.answered()
        self._requests.settle(self)
        self._requests.forget(self)


class InflightRequests:
    """This router's requests at one site."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called after each change."""
        # Sent since the site published its status, in that order, and not yet answering.
        self.pending: dict[Ticket, None] = {}
        self.pending_tokens = 0
        self.unanswered: dict[Ticket, None] = {}  # those that are held to a time, in the order of their sending
        self._unanswered_tokens = 0
        self.open: set[Ticket] = set()
        self._changed = changed

    def add(self, ticket: Ticket) -> None:
        self.open.add(ticket)
        self.pending[ticket] = None
        self.pending_tokens += ticket.tokens
        if ticket.expected_ms is not None:
            self.unanswered[ticket] = None
            self._unanswered_tokens += ticket.tokens
        self._changed()

    @property
    def oldest_unanswered(self) -> Ticket | None:
        return next(iter(self.unanswered), None)

    @property
    def behind_oldest_tokens(self) -> int:
        """Prompt tokens that wait there, behind a request that is not answered either: no status can have seen them computed."""
        oldest = self.oldest_unanswered
        return self._unanswered_tokens - oldest.tokens if oldest is not None else 0

    def overtake(self, ticket: Ticket) -> None:
        """It is answered: what keeps those that were sent before it is not the queue."""
        if ticket in self.unanswered:
            for earlier in tuple(self.unanswered):
                self.forget(earlier)
                if earlier is ticket:
                    return

    def forget(self, ticket: Ticket) -> None:
        if ticket in self.unanswered:
            del self.unanswered[ticket]
            self._unanswered_tokens -= ticket.tokens
            self._changed()

    def settle(self, ticket: Ticket) -> None:
        """Its prompt no longer waits there: it is answered, or in what the site has published."""
        if ticket in self.pending:
            del self.pending[ticket]
            self.pending_tokens -= ticket.tokens
            self._changed()

    def settle_before(self, asked_at: float) -> None:
        """What was sent before then is in the status that the site has published."""
        for ticket in [ticket for ticket in self.pending if ticket.sent_at < asked_at]:
            self.settle(ticket)

    def remove(self, ticket: Ticket) -> None:
        self.open.discard(ticket)
        self.forget(ticket)
        self.settle(ticket)
        self._changed()

    def site_lost(self, reason: str) -> None:
        for ticket in tuple(self.open):
            if not ticket.has_answered and ticket.on_site_lost is not None:
                ticket.on_site_lost(reason)


class OutlierEjection:
    """A site whose last answers were failures is not asked for a while."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self.until = float("-inf")
        self._clock = clock
        self._changed = changed
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
            self._changed()


class PublishedStatus:
    """What a site said of itself last."""

    def __init__(self) -> None:
        self.status: SiteStatus | None = None
        self.at = float("-inf")  # when it was asked for
        self.digests = 0  # the edition that is known of its models' prefixes; 0: none
        self.prefixes: frozenset[int] = frozenset()
        self._by_model: dict[str, frozenset[int]] = {}
        self.backlog_ms = 0.0

    def take(self, status: SiteStatus, asked_at: float) -> bool:
        """Return whether it is newer than what was known. Answers may overtake each other; a restarted site counts from one again and has another
        process id."""
        known = self.status
        if known is not None and _pid(known) == _pid(status) and status.sequence < known.sequence:
            return False
        self._learn_prefixes(status)
        if any([model.prefixes or model.prefixes_dropped for model in status.models]):  # they are decoded
            models = tuple([replace(model, prefixes=b"", prefixes_dropped=b"") for model in status.models])
            status = replace(status, models=models)
        self._set(status, asked_at)
        return True

    def correct_queue(self, model: str, queued_tokens: int, asked_at: float) -> bool:
        """One model's queue is longer than it was taken to be. Return whether there is a status that could say so."""
        if self.status is None:
            return False
        models = tuple(
            replace(known, queued_tokens=queued_tokens) if model == known.name or model in known.aliases else known
            for known in self.status.models
        )
        self._set(replace(self.status, models=models), asked_at)
        return True

    def _set(self, status: SiteStatus, asked_at: float) -> None:
        self.status, self.at = status, asked_at
        queues_ms = [
            1000 * m.queued_tokens / m.prefill_tokens_per_s for m in status.models if m.prefill_tokens_per_s > 0
        ]
        self.backlog_ms = max(queues_ms, default=0.0)

    def _learn_prefixes(self, status: SiteStatus) -> None:
        """A malformed digest is as good as none: it only says where a cache is. Where changes cannot be applied, all is asked for next."""
        since = status.digests_since
        if since and since == status.digests == self.digests:
            return
        if since and since != self.digests:
            self.digests = 0
            return
        held = self._by_model if since else {}
        try:
            self._by_model = {
                model.name: apply_changes(held.get(model.name, frozenset()), model.prefixes, model.prefixes_dropped)
                for model in status.models
            }
            self.digests = status.digests
        except ValueError:
            self._by_model, self.digests = {}, 0
        first, *others = self._by_model.values() or [frozenset[int]()]
        self.prefixes = first.union(*others) if others else first


class ProbedState:
    """What a site's probes say of it."""

    def __init__(self, config: HealthConfig, clock: Callable[[], float]) -> None:
        self.state: State = "unknown"
        self.detail = "not yet asked"  # why the state is what it is
        self.refuses_hops = False  # it takes nothing that this router signs
        self.was_healthy = False
        self.slow_start_until = float("-inf")
        self.failures = 0  # in a row
        self._successes = 0  # likewise
        self._config = config
        self._clock = clock

    def answered(self, status: SiteStatus) -> None:
        self.refuses_hops = False
        self.failures = 0
        if status.draining:
            self.become("draining", "the site is draining")
        elif not status.ready:
            self.become("unhealthy", "the site says that it is not ready")
        else:
            self._successes += 1
            flapping = self.state == "unhealthy" and self.was_healthy
            if not flapping or self._successes >= RECOVER_AFTER:
                if self.was_healthy and self.state == "unhealthy":
                    self.slow_start_until = self._clock() + SLOW_START_S
                self.become("healthy", "")
                self.was_healthy = True

    def failed(self, reason: str) -> bool:
        """Return whether the site is taken to be lost."""
        self.failures += 1
        self._successes = 0
        if self.failures < self._config.unhealthy_after:
            return False
        self.refuses_hops = False
        self.become("unhealthy", reason)
        return True

    def become(self, state: State, detail: str) -> None:
        if state != "healthy":
            self._successes = 0
        self.state, self.detail = state, detail


class _CachedView(NamedTuple):
    view: BackendView
    since: float
    until: float


class Backend:
    def __init__(self, site: SiteRef, round_trip: RoundTrip, health: HealthConfig, clock: Callable[[], float]) -> None:
        self.name = site.name
        self.url = site.url
        self.place = Place(site.place.city, site.place.latitude, site.place.longitude)
        self.round_trip = round_trip
        self.published = PublishedStatus()
        self.is_cordoned = False
        self._health = health
        self._clock = clock
        self.probed = ProbedState(health, clock)
        self._requests = InflightRequests(self._changed)
        self._ejection = OutlierEjection(clock, self._changed)
        self._lateness = Lateness(clock)
        self._view: _CachedView | None = None

    @property
    def state(self) -> State:
        return "draining" if self.is_cordoned and self.probed.state == "healthy" else self.probed.state

    @property
    def detail(self) -> str:
        """Why the state is what it is."""
        return self.probed.detail or ("cordoned by an operator, here" if self.is_cordoned else "")

    def cordon(self, is_cordoned: bool) -> None:
        """Give the site no new requests from this router, or take that back."""
        self.is_cordoned = is_cordoned
        self._changed()

    @property
    def status(self) -> SiteStatus | None:
        return self.published.status

    @property
    def outstanding(self) -> int:
        """This router's requests under way there."""
        return len(self._requests.open)

    @property
    def is_in_doubt(self) -> bool:
        """It was well, and its last probe failed."""
        return self.probed.failures > 0 and self.state == "healthy"

    @property
    def is_frozen(self) -> bool:
        """Its probes fail. One that answers them, only to say that it is not ready or does not know us, knows about its streams itself."""
        return self.state == "unhealthy" and not self.probed.refuses_hops and (self.status is None or self.status.ready)

    def inflight(
        self, tokens: int, on_site_lost: Callable[[str], None] | None = None, expected_ms: float | None = None
    ) -> Ticket:
        return Ticket(self._requests, self._ejection, tokens, self._clock(), on_site_lost, expected_ms)

    def first_token(self, expected_ms: float, actual_ms: float) -> None:
        """A stream has begun, so long after its request was sent."""
        self._lateness.observe(expected_ms, actual_ms)
        self._changed()

    def answered(self, status: SiteStatus, asked_at: float) -> None:
        """A probe came back. What was sent before the probe was asked is in the status itself."""
        if self.published.take(status, asked_at):
            self._requests.settle_before(asked_at)
        self.probed.answered(status)
        self._changed()

    def declined(self, model: str, queued_tokens: int, asked_at: float) -> None:
        """The site would rather not, for its queue is longer than it was taken to be: so long. It is as alive as one that answers."""
        if self.published.correct_queue(model, queued_tokens, asked_at):
            self._requests.settle_before(asked_at)
            self._changed()

    def failed(self, reason: str) -> None:
        """A probe failed, or a connection could not be made."""
        is_lost = self.probed.failed(reason)
        self._changed()
        if is_lost:
            self._requests.site_lost(reason)

    def refused_hop(self, reason: str) -> None:
        """It is there, and takes nothing that this router signs. What it has taken, it goes on with."""
        self.probed.refuses_hops = True
        self.probed.become("unhealthy", reason)
        self._changed()

    def refused_draining(self) -> None:
        """The site refused a request because it drains; its next status will say the same."""
        self.probed.become("draining", "the site is draining")
        self._changed()

    def view(self) -> BackendView:
        """Made anew only when something has changed: a decision looks at every site, and most have been quiet since the last one."""
        now, known = self._clock(), self._view
        if known is None or not known.since <= now < known.until or known.view.rtt_ms != self.round_trip.ms:
            known = self._view = self._look(now)
        return known.view

    def published_view(self) -> SiteView:
        return SiteView(self.name, self.url, self.state, round(self.round_trip.ms, 3), self.outstanding, self.status)

    def _changed(self) -> None:
        self._view = None

    def _look(self, now: float) -> _CachedView:
        published, requests, ejected_until = self.published, self._requests, self._ejection.until
        stale_at = published.at + self._health.stale_after_s
        slow_start = 1.0
        if self.probed.slow_start_until > now:
            slow_start = max(0.0, 1 - (self.probed.slow_start_until - now) / SLOW_START_S)
        changes = [at for at in (stale_at, ejected_until) if at > now]
        first, oldest = next(iter(requests.pending), None), requests.oldest_unanswered
        overdue_ms = 0.0
        if oldest is not None and oldest.expected_ms is not None:
            due_at = oldest.sent_at + TOLERANCE * oldest.expected_ms / 1000
            overdue_ms = max(0.0, 1000 * (now - due_at))
            changes.append(max(now, due_at))
        if not self._lateness.is_punctual:
            changes.append(now + FORGETTING_S)
        view = BackendView(
            name=self.name,
            state=self.state,
            place=self.place,
            rtt_ms=self.round_trip.ms,
            seed_rtt_ms=self.round_trip.seed_ms,
            outstanding=len(requests.open),
            pending_requests=len(requests.pending),
            pending_tokens=requests.pending_tokens,
            pending_since_s=first.sent_at if first is not None else 0.0,
            unanswered_tokens=requests.behind_oldest_tokens,
            lateness_ms=self._lateness.mean_ms(overdue_ms),
            backlog_ms=published.backlog_ms,
            status=published.status,
            status_is_fresh=now < stale_at,
            status_at_s=published.at,
            prefixes=published.prefixes,
            is_ejected=now < ejected_until,
            slow_start=slow_start,
        )
        return _CachedView(view, now, min(changes, default=float("inf")) if slow_start >= 1 else now)


def _pid(status: SiteStatus) -> int | None:
    return next((process.pid for process in status.processes if process.role == "site"), None)
