"""One request in progress: the request for the next site, failed sites, and cuts of its stream.

This module has facts of a request, and the rules by which they change. Sending, choosing and answering are in proxy.py.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pilotlight.edge_router.forwarding.relay import DeliveryLog
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost
from pilotlight.edge_router.forwarding.timeouts import AttemptLimits
from pilotlight.edge_router.requests.request import ValidRequest
from pilotlight.edge_router.routing.views import MAX_DECLINES, Preference
from pilotlight.edge_router.telemetry.tracing import RequestTrace
from pilotlight.response_store.kept_responses import KeptResponse
from pilotlight.sites.network import RelayConfig
from pilotlight.support.time_limits import NO_PAUSES, Pauses
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import MAX_DELIVERED_BYTES, AnswerName, ContinuationError, strip_resume_point
from pilotlight.wire.hop.usage import NOTHING_USED, ResourceUse

MAX_HANDOVERS = 16  # moves of one stream because of drains: each is a deploy of a site
MAX_MOVES = 8  # moves of one stream because of silent sites: each computes its prompt again
SETTLED_S = 5.0  # after this long without a move the stall timeout resets to its base value
SHARE = 0.2  # retries added for each request: if every site fails, sites get 1.2 times the traffic instead of 3 times
FLOOR_PER_S = 5.0  # retries added each second, so that a quiet router can retry
MOST = 100.0  # the most retries that a quiet time saves up
# Fill level of the common budget above which every account may retry. Below it each account uses only its own share (ACCOUNT_MOST).
SHARED_ABOVE = 70.0
ACCOUNT_MOST = 30.0
ACCOUNT_FLOOR_PER_S = 1.0
MAX_ACCOUNTS = 4096  # accounts whose shares are remembered; any other account starts with a full share


RECORDED = "pilotlight.recorded"  # key in the scope of an admitted request: its RecordedAnswer, if it has one


class RecordedAnswer(NamedTuple):
    """An answer that is recorded in a stored response, so that another router may continue it."""

    name: AnswerName
    response: KeptResponse
    events: Sequence[bytes] | None = None  # stored events, with their resume points, if another router has started it


class SiteTries(msgspec.Struct, eq=False):
    """The sites asked since a request came, or since its stream was last cut."""

    failures: dict[str, SiteFailed] = msgspec.field(default_factory=dict)
    excluded: set[str] = msgspec.field(default_factory=set)  # sites not to be tried again yet
    declined: set[str] = msgspec.field(default_factory=set)  # sites that declined
    is_paid: bool = False  # the next try is paid already, from the budget of retries
    num_silent: int = 0  # sites that were left because they were silent
    # the error with which two sites failed alike: the request is at fault, and further sites would fail, too
    repeated: str = ""

    def failed(self, site: str, failure: SiteFailed, *, is_draining: bool = False) -> None:
        """Record a failed attempt.

        A draining site ends any request that it no longer waits for, so its error says nothing about this one."""
        self.excluded.add(site)
        if is_draining:
            failure.words = ""
        if failure.kind == "declined" and site not in self.declined:
            self.declined.add(site)
            self.is_paid = True  # the failed attempt was free, so its payment counts for the next one
            if len(self.declined) == MAX_DECLINES:
                self.readmit_declined()
            return
        if failure.words and any(other.words == failure.words for name, other in self.failures.items() if name != site):
            self.repeated = failure.words
        self.failures[site] = failure
        self.num_silent += failure.kind == "silent"

    def readmit_declined(self) -> bool:
        """Allow sites that declined to be asked again; they must then accept the request."""
        returning = (self.declined & self.excluded) - self.failures.keys()
        self.excluded -= returning
        return bool(returning)

    def try_again(self) -> None:
        """Allow another round over all sites except those that refused the request."""
        self.excluded = {site for site, failure in self.failures.items() if failure.kind == "refused"}

    def begin_anew(self, lost_site: str) -> None:
        """Reset after a cut: all sites may be asked to continue the stream.

        The site that lost it may be asked only if no other can continue for a while.
        """
        self.failures, self.excluded, self.num_silent, self.repeated = {}, {lost_site}, 0, ""


class StreamRecovery(msgspec.Struct, eq=False):
    """Counts a stream's cuts, and records when its client last received something.

    Times are on the router's clock.
    """

    config: RelayConfig
    pauses: Pauses
    lost: StreamLost | None = None  # why the stream was last cut; None if it never was
    lost_site: str = ""
    is_cut: bool = False  # cut and not continued yet
    cut_at: float = 0.0
    delivered_at: float = 0.0
    went_on_at: float = 0.0  # the time of the first delivery after a cut
    num_losses: int = 0
    num_handovers: int = 0
    num_moves: int = 0
    moves_in_a_row: int = 0

    def cut(self, site: str, lost: StreamLost, now: float) -> None:
        self.lost, self.lost_site, self.is_cut = lost, site, True
        if lost.cause == "draining":
            self.num_handovers += 1
        elif lost.cause == "stalled":
            self.moves_in_a_row = 1 if self.is_settled else self.moves_in_a_row + 1
            self.num_moves += 1
        else:
            self.num_losses += 1
        self.cut_at = now

    def left_s(self, now: float) -> float:
        """Return how many seconds are left to continue after a cut."""
        return max(0.0, self.config.continue_within_s - self.pauses.silent_s(self.cut_at, now))

    def delivered(self, now: float) -> float | None:
        """Record a delivery to the client. Return how long it had waited if this ends a cut."""
        waited_s = None
        if self.is_cut:
            waited_s = now - self.delivered_at
            self.is_cut = False
            self.went_on_at = now
        self.delivered_at = now
        return waited_s

    @property
    def may_be_cut_again(self) -> bool:
        return self.num_losses <= self.config.max_losses and self.num_handovers <= MAX_HANDOVERS

    @property
    def may_move(self) -> bool:
        return self.num_moves < MAX_MOVES and self.config.max_losses > 0

    @property
    def may_be_handed_over(self) -> bool:
        return self.num_handovers < MAX_HANDOVERS

    @property
    def is_settled(self) -> bool:
        return self.delivered_at - self.went_on_at >= SETTLED_S

    @property
    def stall_s(self) -> float:
        """Return the limit of silence, doubled by each move that did not help.

        So a stream does not move back and forth between slow sites.
        """
        return self.config.stall_s * (1 if self.is_settled else 2.0**self.moves_in_a_row)


class RequestState:
    def __init__(
        self,
        request: ValidRequest,
        config: RelayConfig,
        started_at: float,
        max_delivered_bytes: int = MAX_DELIVERED_BYTES,
        pauses: Pauses = NO_PAUSES,
        recorded: RecordedAnswer | None = None,
    ) -> None:
        self.request = request  # the request for the next site
        self._waited_before_ms = request.waited_ms
        self.started_at = started_at
        self._recorded = recorded
        self.log = DeliveryLog(max_delivered_bytes, is_recorded=recorded is not None)
        self.tries = SiteTries()
        self.recovery = StreamRecovery(config, pauses)
        self.look_again_at = 0.0  # earliest time at which a draining site's stream looks for another site again
        self.whole = NOTHING_USED  # usage of an answer in one piece
        self.is_complete = False  # the client got the end
        self.site = ""  # the site that answered last
        self.status = 0  # status of its answer
        self.first_token_s: float | None = None  # seconds from the request's arrival to a stream's first token
        self.trace: RequestTrace | None = None  # None unless requests are traced
        self.is_admitted = False  # every stage has admitted it (stages.py)
        self.has_asked = False  # a site has been asked
        self._config = config
        if recorded is not None:
            self.request = replace(request, answer_name=recorded.name)
            for event in recorded.events or ():
                if (point := strip_resume_point(event)[1]) is not None:
                    self.log.add(point)
        self._tokens_before = self.log.num_tokens  # delivered by the routers before this one

    def follow(self, trace: RequestTrace) -> None:
        self.trace = trace

    def admitted(self) -> None:
        self.is_admitted = True

    @property
    def is_continued(self) -> bool:
        """Tell whether another router has started the answer."""
        return self._recorded is not None and self._recorded.events is not None

    def continue_answer(self, now: float) -> None:
        """Continue another router's answer as if its stream was cut. Raises ApiError."""
        try:
            self.cut("", StreamLost("router", "it has stopped"), now)
        except ContinuationError as error:
            raise ApiError("upstream_lost", f"the router was lost before the end of its answer: {error}") from None
        self.recovery.delivered_at = now

    @property
    def is_left(self) -> bool:
        """Tell whether another router continues the answer, and records the usage of all of it."""
        return self._recorded is not None and self._recorded.response.is_left

    def answered_whole(self, use: ResourceUse) -> None:
        self.whole = use
        if self.log.meter is not None:
            self.log.meter.count(use)

    def answered_by(self, site: str, status: int, *, is_stream: bool, elapsed_s: float) -> None:
        self.site, self.status = site, status
        if self.log.meter is not None:
            self.log.meter.answered_by(site)
        if is_stream and self.first_token_s is None:
            self.first_token_s = elapsed_s

    def ask(self, max_queue_ms: float | None, now: float) -> ValidRequest:
        """Return the request for the next site, which is as old there as it was at the sites before.
        A new request may be declined a few times, also after a site was lost, because many requests move at once then. After that the best site must
        accept it, as a site must accept a continued stream."""
        request, waited_ms = self.request, self._waited_before_ms
        may_decline = self.recovery.lost is None and len(self.tries.declined) < MAX_DECLINES
        limit = max_queue_ms if may_decline else None
        if self.has_asked:
            waited_ms += round(1000 * (now - self.started_at))
        self.has_asked = True
        if limit != request.max_queue_ms or waited_ms != request.waited_ms:
            request = self.request = replace(request, max_queue_ms=limit, waited_ms=waited_ms)
        return request

    def expected_ms(self, preference: Preference) -> float | None:
        """Return the expected time to the next site's first token, in ms; None if it is unknown.
        It is unknown for a continued stream, if the site has published nothing yet, or if the duration does not depend on the site's queue."""
        request = self.request
        if self.recovery.lost is not None or request.model is None or request.is_generated_whole:
            return None
        if preference.backend.status is None:
            return None
        return preference.expected_ms

    def attempt_limits(self, first_stall_s: float, now: float) -> AttemptLimits:
        """Return the limits of an attempt.

        A site that freezes while it continues a stream must leave time for another site.
        """
        if self.recovery.lost is None:
            return AttemptLimits(self._config.first_byte_timeout_s, first_stall_s, is_continuation=False)
        return AttemptLimits(self.recovery.left_s(now) / 2, first_stall_s, is_continuation=True)

    def cut(self, site: str, lost: StreamLost, now: float) -> None:
        """Mark the stream as cut; the next site continues it. Raises ContinuationError."""
        self.recovery.cut(site, lost, now)
        self.tries.begin_anew(site)
        self.log.leave_site()
        self.request = replace(self.request, delivery=self.log.delivery(), delivered_tokens=self.log.num_tokens)

    @property
    def can_continue_elsewhere(self) -> bool:
        """Tell whether the answer is short enough to be sent to another site."""
        try:
            self.log.delivery()
        except ContinuationError:
            return False
        return True

    @property
    def first_stall_s(self) -> float:
        """Return the allowed silence before the next site's first token.
        It is shorter for a stream that was cut, because its client has waited already."""
        return self._config.stall_s * (2 if self.recovery.lost is None else 1) * 2.0**self.tries.num_silent

    def is_out_of_tries(self, now: float) -> bool:
        """Tell whether no further attempt is allowed.

        A new request has a number of attempts; a cut stream may try all sites repeatedly for a while.
        """
        if self.recovery.lost is None:
            return len(self.tries.failures) >= self._config.max_tries
        return self.recovery.left_s(now) <= 0.0

    @property
    def delivered_tokens(self) -> int:
        """Return the number of tokens that this router has delivered of the answer."""
        return self.log.num_tokens - self._tokens_before + self.whole.output + self.log.num_uncounted

    def end_trace(self, error: BaseException | None) -> None:
        """End the trace, if there is one; `error` is the error that ended the request."""
        if self.trace is not None:
            used = self.log.used if self.log.has_started else self.whole
            self.trace.end(
                status=self.status,
                is_complete=self.is_complete,
                first_token_s=self.first_token_s,
                used=None if self.request.model is None else used,
                error=error,
            )

    @property
    def is_at_first_try(self) -> bool:
        return self.recovery.lost is None and not self.tries.failures and not self.tries.declined

    def end_of_stream(self) -> ApiError:
        """Return the error for a client whose stream cannot continue."""
        lost = self.recovery.lost
        assert lost is not None
        who = f"the site {self.recovery.lost_site}" if self.recovery.lost_site else "the router"
        sentence = f"{who} was lost before the end of its answer: {lost}"
        if self.tries.failures:
            tried = "; ".join(f"{site}: {failure.detail}" for site, failure in self.tries.failures.items())
            sentence += f"; no other site could continue it: {tried}"
        return ApiError("upstream_lost", sentence)


Close = Callable[[BaseException | None, float], None]
"""Gets the error that ended the request, and the seconds since it arrived."""
Stage = Callable[[RequestState], Awaitable[Close | None]]
"""Returns the function that closes the stage (stages.py), if any. Raises ApiError to refuse the request."""


class RetryBudget:
    """The budget of retries: a share of recent requests, so that retries do not multiply the load.

    Every request adds a little to a bucket, and every retry takes one out; a floor allows a quiet router to retry. Each account also has a smaller
    bucket: when the large one runs low, an account uses at most its share, so that one account's failing requests do not use up the retries of the
    others. A declined request is not a failure and costs nothing; continuing a stream costs nothing either.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = _Bucket(SHARED_ABOVE, MOST, FLOOR_PER_S, clock())
        self._accounts: OrderedDict[str, _Bucket] = OrderedDict()  # the most recently used last

    @property
    def left(self) -> float:
        return self._all.left(self._clock())

    def deposit(self, account: str | None = None) -> None:
        """Count a request of an account."""
        self._all.add(SHARE)
        if account is not None:
            self._account(account).add(SHARE)

    def withdraw(self, account: str | None = None) -> bool:
        """Pay for one more try of an account's request. Return False if it may not be made."""
        now = self._clock()
        left = self._all.left(now)
        if left < 1:
            return False
        if account is not None and left <= SHARED_ABOVE:
            own = self._account(account)
            if own.left(now) < 1:
                return False
            own.add(-1)
        self._all.add(-1)
        return True

    def _account(self, account: str) -> "_Bucket":
        if (bucket := self._accounts.get(account)) is not None:
            self._accounts.move_to_end(account)
            return bucket
        bucket = self._accounts[account] = _Bucket(ACCOUNT_MOST, ACCOUNT_MOST, ACCOUNT_FLOOR_PER_S, self._clock())
        if len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return bucket


class _Bucket:
    def __init__(self, tries: float, most: float, floor_per_s: float, now: float) -> None:
        self._tries = tries
        self._most = most
        self._floor_per_s = floor_per_s
        self._filled_at = now

    def left(self, now: float) -> float:
        self._tries = min(self._most, self._tries + self._floor_per_s * max(0.0, now - self._filled_at))
        self._filled_at = now
        return self._tries

    def add(self, tries: float) -> None:
        self._tries = min(self._most, self._tries + tries)
