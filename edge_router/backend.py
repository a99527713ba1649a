"""A site as the router sees it now: state, round trip, newest status, and what was sent there since that was published.

Holds facts and the rules by which they change; who probes, who sends and who chooses are other files' business.
"""

from collections.abc import Callable
from types import TracebackType

from msgspec.structs import replace

from edge_router.policy import BackendView, State
from edge_router.rtt import RoundTrip
from sites.network import HealthConfig, SiteRef
from wire.prefixes import decode_prefixes
from wire.status import Place, SiteStatus, SiteView

EJECT_AFTER = (
    5  # tries in a row that brought no answer; a full house that refuses politely counts too: it is given time
)
EJECTED_S = 5.0  # the first time; twice as long each further time, while nothing but failures follow
EJECTED_MAX_S = 60.0
FADE_IN_S = 10.0  # after an outage: a site with an empty queue and an empty cache must not draw everybody at once
RECOVER_AFTER = 2  # good probes in a row, after which a site that was healthy before and then failed is trusted again


class Ticket:
    """One request on its way to a site, from its making until its scope is left (or it is given back, where there is none). Until the site begins to
    answer, its prompt stands in the site's queue, and the request can still go elsewhere: `on_site_lost` is called, with the reason, when the site
    fails meanwhile."""

    def __init__(
        self, backend: "Backend", tokens: int, sent_at: float, on_site_lost: Callable[[str], None] | None
    ) -> None:
        self.tokens = tokens
        self.sent_at = sent_at
        self.has_answered = False
        self.on_site_lost = on_site_lost
        self._backend = backend
        backend._sent(self)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and not self.has_answered:  # nothing came: a client that leaves ends the scope by an exception
            self._backend._try_failed()
        self.give_back()

    def give_back(self) -> None:
        """Without a word on what came of it."""
        self._backend._returned(self)

    def answering(self) -> None:
        """The site has begun to answer."""
        self.has_answered = True
        self._backend._failed_tries = self._backend._ejections = 0
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
        self.refuses_hops = False  # it takes nothing that this router signs
        self._status_at = float("-inf")
        self._prefixes: frozenset[int] = frozenset()
        self._health = health
        self._clock = clock
        self._failures = 0
        self._successes = 0
        self._was_healthy = False
        self._pending: dict[Ticket, None] = {}  # in the order they were sent
        self._pending_tokens = 0
        self._waiting: set[Ticket] = set()  # nothing has come back yet
        self._failed_tries = 0  # in a row
        self._ejections = 0  # likewise
        self._ejected_until = float("-inf")
        self._trusted_since = float("-inf")
        self._view: BackendView | None = None
        self._view_from = self._view_until = 0.0

    @property
    def was_ever_healthy(self) -> bool:
        return self._was_healthy

    @property
    def is_in_doubt(self) -> bool:
        """It was well, and its last probe failed."""
        return self._failures > 0 and self.state == "healthy"

    @property
    def is_frozen(self) -> bool:
        """Its probes fail. One that answers them, only to say that it is not ready or does not know us, knows about its streams itself."""
        return self.state == "unhealthy" and not self.refuses_hops and (self.status is None or self.status.ready)

    def inflight(self, tokens: int, on_site_lost: Callable[[str], None] | None = None) -> Ticket:
        return Ticket(self, tokens, self._clock(), on_site_lost)

    def _sent(self, ticket: Ticket) -> None:
        self.outstanding += 1
        self._pending[ticket] = None
        self._pending_tokens += ticket.tokens
        self._waiting.add(ticket)
        self._view = None

    def _returned(self, ticket: Ticket) -> None:
        self.outstanding -= 1
        self._view = None
        self._settle(ticket)
        self._waiting.discard(ticket)

    def answered(self, status: SiteStatus, asked_at: float) -> None:
        """A probe came back. What was sent before the probe was asked is in the status itself."""
        self._view = None
        self.refuses_hops = False
        self._failures = 0
        if not self._is_older(status):
            self._prefixes = self._published_prefixes(status)
            self.status, self._status_at = status, asked_at
            self._settle_before(asked_at)
        if status.draining:
            self._become("draining", "the site is draining")
        elif not status.ready:
            self._become("unhealthy", "the site says that it is not ready")
        else:
            self._successes += 1
            flapping = self.state == "unhealthy" and self._was_healthy
            if not flapping or self._successes >= RECOVER_AFTER:
                if self._was_healthy and self.state == "unhealthy":
                    self._trusted_since = self._clock() + FADE_IN_S
                self._become("healthy", "")
                self._was_healthy = True

    def declined(self, model: str, queued_tokens: int, asked_at: float) -> None:
        """The site would rather not, for its queue is longer than it was taken to be: so long. It is as alive as one that answers."""
        status = self.status
        if status is None:
            return
        models = tuple(
            replace(known, queued_tokens=queued_tokens) if model == known.name or model in known.aliases else known
            for known in status.models
        )
        self.status, self._status_at = replace(status, models=models), asked_at
        self._settle_before(asked_at)

    def failed(self, reason: str) -> None:
        """A probe failed, or a connection could not be made."""
        self._failures += 1
        self._successes = 0
        if self._failures >= self._health.unhealthy_after:
            self.refuses_hops = False
            self._become("unhealthy", reason)
            for ticket in tuple(self._waiting):
                if ticket.on_site_lost is not None:
                    ticket.on_site_lost(reason)

    def refused_hop(self, reason: str) -> None:
        """It is there, and takes nothing that this router signs. What it has taken, it goes on with."""
        self.refuses_hops = True
        self._become("unhealthy", reason)

    def refused_draining(self) -> None:
        """The site refused a request because it drains; its next status will say the same."""
        self._become("draining", "the site is draining")

    def view(self) -> BackendView:
        """Made anew only when something has changed: a decision looks at every site, and most have been quiet since the last one."""
        now = self._clock()
        known = self._view
        if known is None or not self._view_from <= now < self._view_until or known.rtt_ms != self.round_trip.ms:
            known = self._view = self._look(now)
        return known

    def _look(self, now: float) -> BackendView:
        stale_at = self._status_at + self._health.stale_after_s
        trust = min(1.0, max(0.0, 1 - (self._trusted_since - now) / FADE_IN_S))
        changes = [at for at in (stale_at, self._ejected_until) if at > now]
        self._view_from = now
        self._view_until = min(changes, default=float("inf")) if trust >= 1 else now
        first = next(iter(self._pending), None)
        return BackendView(
            name=self.name,
            state=self.state,
            place=self.place,
            rtt_ms=self.round_trip.ms,
            seed_rtt_ms=self.round_trip.seed_ms,
            outstanding=self.outstanding,
            pending_requests=len(self._pending),
            pending_tokens=self._pending_tokens,
            pending_since_s=first.sent_at if first is not None else 0.0,
            status=self.status,
            status_is_fresh=now < stale_at,
            status_at_s=self._status_at,
            prefixes=self._prefixes,
            is_ejected=now < self._ejected_until,
            trust=trust,
        )

    def published_view(self) -> SiteView:
        return SiteView(self.name, self.url, self.state, round(self.round_trip.ms, 3), self.outstanding, self.status)

    def _become(self, state: State, detail: str) -> None:
        if state != "healthy":
            self._successes = 0
        self.state, self.detail = state, detail
        self._view = None

    def _is_older(self, status: SiteStatus) -> bool:
        """Answers may overtake each other; a restarted site counts from one again and has another process id."""
        known = self.status
        return known is not None and _pid(known) == _pid(status) and status.sequence < known.sequence

    def _try_failed(self) -> None:
        self._failed_tries += 1
        if self._failed_tries >= EJECT_AFTER:
            self._ejected_until = self._clock() + min(EJECTED_MAX_S, EJECTED_S * 2.0**self._ejections)
            self._ejections = min(self._ejections + 1, 10)
            self._failed_tries = 0
            self._view = None

    def _published_prefixes(self, status: SiteStatus) -> frozenset[int]:
        """Decoded once per change. A malformed digest is as good as none: it only says where a cache is."""
        raw = tuple(model.prefixes for model in status.models)
        if self.status is not None and raw == tuple(model.prefixes for model in self.status.models):
            return self._prefixes
        try:
            sets = [decode_prefixes(part) for part in raw if part]
            return sets[0] if len(sets) == 1 else frozenset().union(*sets)
        except ValueError:
            return frozenset()

    def _settle_before(self, asked_at: float) -> None:
        self._view = None
        for ticket in [ticket for ticket in self._pending if ticket.sent_at < asked_at]:
            self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        if ticket in self._pending:
            del self._pending[ticket]
            self._pending_tokens -= ticket.tokens
            self._view = None


def _pid(status: SiteStatus) -> int | None:
    return next((process.pid for process in status.processes if process.role == "site"), None)
