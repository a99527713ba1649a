"""One request on its way: what is asked of the next site, which sites have failed it, and how often its stream was cut.

Facts and the rules by which they change. Sending, choosing and telling the client are proxy.py's.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from edge_router.asking import Asking
from edge_router.backend import Backend, Ticket
from edge_router.journal import Journal
from edge_router.peek import ValidRequest
from edge_router.policy import MAX_DECLINES, Preference
from edge_router.upstream import Lost, SiteFailed
from sites.network import RelayConfig
from wire.errors import ApiError
from wire.sse import Event

MAX_RETRY_AFTER_S = 60.0
MAX_HANDOVERS = 16  # of one stream by sites that drain: each is a deploy that it outlived
MAX_MOVES = 8  # of one stream away from sites that stall: each costs its prompt once more
SETTLED_S = 5.0  # a stream that has gone on for so long since its last move is as patient as at its beginning


class Asked(NamedTuple):
    """A site, asked. Its ticket is to be left, its asking to be awaited."""

    preference: Preference
    ticket: Ticket
    asking: Asking

    def give_up(self) -> None:
        self.asking.give_up()
        self.ticket.give_back()


def nothing_left(failures: Mapping[str, SiteFailed], backends: Mapping[str, Backend]) -> ApiError:
    if failures:
        tried = "; ".join(f"{site}: {failure.detail}" for site, failure in failures.items())
        sentence = f"no site could answer; tried {tried}"
    else:
        states = "; ".join(f"{backend.name} is {backend.state}: {backend.detail}" for backend in backends.values())
        sentence = f"no site is available; {states}"
    hints = [failure.retry_after_s for failure in failures.values() if failure.retry_after_s is not None]
    return ApiError("no_site_available", sentence, retry_after_s=min([*hints, MAX_RETRY_AFTER_S]) if hints else 1.0)


class Exchange:
    def __init__(self, request: ValidRequest, relay: RelayConfig, started_at: float) -> None:
        self.request = request  # as the next site gets it
        self.started_at = started_at
        self.asked: Asked | None = None  # the first site, before anybody waits for it
        self.journal = Journal()
        self.failures: dict[
            str, SiteFailed
        ] = {}  # sites tried since the request came, or since the stream was last cut
        self.tried: set[str] = set()  # of these, the ones not to be tried again yet
        self.declined: set[str] = set()  # sites that would rather not
        self.lost: Lost | None = None  # why the stream was last cut; None: it never was
        self.lost_site = ""
        self.is_cut = False  # and has not gone on yet
        self.whole_tokens = 0  # of an answer in one piece
        self.unmarked_events = 0  # of a stream that does not say how many tokens they bring
        self.told_at = 0.0  # when the client last heard something of the answer
        self.look_again_at = 0.0  # when a draining site's stream may look for another site once more
        self._relay = relay
        self.went_on_at = 0.0  # when the client last heard something of it behind a cut
        self.is_paid = False  # the next try
        self._losses = 0
        self._handovers = 0
        self._moves = 0
        self._moves_in_a_row = 0
        self._silences = 0  # of sites asked since the stream was last cut
        self._deadline = 0.0

    def take_asked(self) -> Asked | None:
        asked, self.asked = self.asked, None
        return asked

    def asks(self, patience_ms: float | None) -> ValidRequest:
        """What the next site gets. A new request may be declined a few times; then whoever is asked takes it, as it takes what is continued."""
        may_decline = self.lost is None and len(self.declined) < MAX_DECLINES and not self.failures
        patience = patience_ms if may_decline else None
        if patience != self.request.patience_ms:
            self.request = replace(self.request, patience_ms=patience)
        return self.request

    def take_back_declined(self) -> bool:
        """Nobody else is left: the sites that declined are asked again, and have to take it."""
        returning = (self.declined & self.tried) - self.failures.keys()
        self.tried -= returning
        return bool(returning)

    def failed(self, site: str, failure: SiteFailed) -> None:
        if failure.kind == "declined" and site not in self.declined:
            self.declined.add(site)
            self.tried.add(site)
            return
        self.failures[site] = failure
        self.tried.add(site)
        self._silences += failure.kind == "silent"

    def cut(self, site: str, lost: Lost, now: float) -> None:
        """From here the answer is to go on elsewhere; with that site only if there is no other for a while. Raises ContinuationError."""
        self.lost, self.lost_site, self.is_cut = lost, site, True
        self.failures, self.tried, self._silences = {}, {site}, 0
        if lost.cause == "draining":
            self._handovers += 1
        elif lost.cause == "stalled":
            self._moves_in_a_row = 1 if self.is_settled else self._moves_in_a_row + 1
            self._moves += 1
        else:
            self._losses += 1
        self._deadline = now + self._relay.continue_within_s
        self.journal.begin_site()
        self.request = replace(self.request, delivery=self.journal.delivery(), delivered_tokens=self.journal.num_tokens)

    @property
    def may_be_cut_again(self) -> bool:
        return self._losses <= self._relay.max_losses and self._handovers <= MAX_HANDOVERS

    @property
    def may_move(self) -> bool:
        return self._moves < MAX_MOVES and self._relay.max_losses > 0

    @property
    def is_settled(self) -> bool:
        return self.told_at - self.went_on_at >= SETTLED_S

    @property
    def stall_s(self) -> float:
        """Twice as long for each move that has not helped, so that no stream goes to and fro where all sites are slow."""
        return self._relay.stall_s * (1 if self.is_settled else 2.0**self._moves_in_a_row)

    @property
    def first_stall_s(self) -> float:
        """The same before the next site's first token. A stream that stands still has waited already."""
        return self._relay.stall_s * (2 if self.lost is None else 1) * 2.0**self._silences

    def patience_s(self, now: float) -> float:
        """For the next site's first event. A site that freezes while it takes over must leave time for another one."""
        if self.lost is None:
            return self._relay.first_byte_timeout_s
        return max(0.0, self._deadline - now) / 2

    def ready(self, events: list[Event], has_marks: bool) -> bytes:
        """What of a site's events the client may be told now."""
        if has_marks:
            return self.journal.pass_on(events)
        self.unmarked_events += len(events)
        return events[0].raw if len(events) == 1 else b"".join([event.raw for event in events])

    def try_again(self) -> None:
        """Another round over the sites, but for those that have said that they cannot."""
        self.tried = {site for site, failure in self.failures.items() if failure.kind == "refused"}

    def is_out_of_tries(self, now: float) -> bool:
        """A new request has a number of tries. Of a stream that was cut, all sites are asked, again and again, for a while."""
        if self.lost is None:
            return len(self.failures) >= self._relay.max_tries
        return now >= self._deadline

    @property
    def told_tokens(self) -> int:
        """What the client has had of the answer."""
        return self.journal.num_tokens + self.whole_tokens + self.unmarked_events

    @property
    def is_at_first_try(self) -> bool:
        return self.lost is None and not self.failures and not self.declined

    def end_of_stream(self) -> ApiError:
        """What a client is told whose stream cannot go on."""
        assert self.lost is not None
        sentence = f"the site {self.lost_site} was lost before the end of its answer: {self.lost}"
        if self.failures:
            tried = "; ".join(f"{site}: {failure.detail}" for site, failure in self.failures.items())
            sentence += f"; no other site could continue it: {tried}"
        return ApiError("upstream_lost", sentence)
