"""The way of one request through the router: read, rank, ask one site after the other until one begins to answer, relay.

A site that fails costs the client nothing but time: before its first byte the next one answers, after it the next one goes on with the same
answer. When none is left an honest error event ends the stream. Knows no policy, no probes and no HTTP client: it joins them.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec.structs import force_setattr
from starlette.types import Receive, Scope, Send

from edge_router.ahead import Ahead
from edge_router.aside import AT_ONCE_BYTES, aside_if_large
from edge_router.asking import Asking
from edge_router.backend import Backend, Ticket
from edge_router.client_places import ClientPlaces
from edge_router.downstream import ClientGone, Downstream, Listener
from edge_router.durable import Recording, Recordings, accepted, asks_for_it, is_mentioned, owner_of, tell
from edge_router.exchange import Asked, Exchange, nothing_left
from edge_router.hints import WakeHints
from edge_router.limits import Limits
from edge_router.metrics import NO_SITE, RouterMetrics
from edge_router.pace import Pace
from edge_router.peek import FUNCTIONS, Head, Reading, ValidRequest, look, peek, read
from edge_router.plain import PlainEvent
from edge_router.policy import Policy, Preference, RouteRequest
from edge_router.retries import RetryBudget
from edge_router.session import SessionTable
from edge_router.upstream import Answer, Lost, SiteFailed, Upstream, is_sites_own_fault
from sites.network import RelayConfig
from wire.continuation import ContinuationError
from wire.credentials import Access
from wire.errors import ApiError
from wire.headers import REQUEST_ID, ROUTE
from wire.http.exchange import Exchange as HttpExchange
from wire.sse import Event

PREFIXES = ("/ai/v1/", "/v1/", "/client/v4/", FUNCTIONS)  # what is forwarded
MODEL_LISTS = ("/v1/models", "/ai/v1/models")
DRAIN_POLL_S = 0.05
# failures of a site that has not begun the request
UNTOUCHED = ("connect", "full", "draining", "no_model", "untrusted", "no_files")
TRY_AGAIN_S = 0.5  # between rounds over the sites, while a stream that was cut can go on at none
LAST_WORDS_S = 1.0  # for the error events of streams that a drain cuts

_PLAIN_TARGET = re.compile(r"[\x21-\x7e]+")

log = logging.getLogger(__name__)


class Proxy:
    """An ASGI application."""

    def __init__(
        self,
        relay: RelayConfig,
        backends: Mapping[str, Backend],
        policy: Policy,
        sessions: SessionTable,
        metrics: RouterMetrics,
        limits: Limits,
        recordings: Recordings,
        clock: Callable[[], float],
        *,
        access: Access,
        places: ClientPlaces,
        secret: str,
        body_timeout_s: float,
    ) -> None:
        self.relay = relay
        self.places = places
        self._access = access
        self.limits = limits
        self.recordings = recordings
        self.body_timeout_s = body_timeout_s
        self._max_body_bytes = int(relay.max_body_mib * 2**20)
        self.backends = backends
        self.policy = policy
        self.sessions = sessions
        self.metrics = metrics
        self.upstream: Upstream | None = None  # open while the application runs
        self.hints: WakeHints | None = None  # likewise
        self.is_draining = False
        self.secret = secret
        self._clock = clock
        self._open: set[Listener] = set()
        metrics.watch("open_requests", "Requests under way.", lambda: len(self._open))
        self.retries = RetryBudget(clock)
        self.pace = Pace(relay, self.rank, self.retries)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self._begun(Downstream.of(scope, receive, send))

    def direct(self, exchange: HttpExchange) -> Coroutine[Any, Any, None]:
        return self._begun(Downstream.directly(exchange))

    def _begun(self, client: Downstream) -> Coroutine[Any, Any, None]:
        """What need not wait is done here and now, mostly up to asking a site; what is returned does the rest."""
        self._open.add(client)
        ahead = Ahead()
        try:
            self._go_ahead(client, ahead)
        except Exception as error:  # a client is told in its own time
            ahead.error = error
        return self._answered(client, self._admitted(client, ahead))

    async def _answered(self, client: Listener, work: Coroutine[Any, Any, None]) -> None:
        """Whatever comes of it, it is counted, and the client is told."""
        self._open.add(client)
        try:
            await work
        except ClientGone:
            self.metrics.ended(NO_SITE, "client_gone")
        except ApiError as error:
            self.metrics.ended(NO_SITE, error.word)
            await client.refuse(error)
        except asyncio.CancelledError:
            self.metrics.ended(NO_SITE, "stopped")
            raise
        except Exception:
            log.exception("request %s failed inside the router", client.request_id)
            self.metrics.ended(NO_SITE, "internal_error")
            await client.refuse(
                ApiError("internal_error", "the router failed; its log has the reason under this request id")
            )
        finally:
            self._open.discard(client)

    def _go_ahead(self, client: Downstream, ahead: "Ahead") -> None:
        self.check(client.head)
        ahead.enter(self.limits.admitted(client.head, client.address))
        if (body := client.whole_body(self._max_body_bytes)) is None:
            return
        ahead.body = body
        if len(body) <= AT_ONCE_BYTES and not is_mentioned(client.head, body):
            exchange = ahead.exchange = self._exchange(client, body)
            route, preferences = self.rank(exchange.request)
            if preferences:
                exchange.asked = asked = self._ask(client, exchange, route, preferences[0])
                if asked.asking.is_sent:
                    asked.asking.listen(client.hold())
                self._consider_hints(exchange, route, preferences)

    async def _admitted(self, client: Downstream, ahead: "Ahead") -> None:
        with ahead:
            if ahead.error is not None:
                raise ahead.error
            if ahead.exchange is not None:
                return await client.while_present(self._through(client, ahead.exchange))
            body = await self._body(client) if ahead.body is None else ahead.body
            is_durable, is_async, body = await aside_if_large(body, asks_for_it, client.head, body)
            if not is_durable:
                return await client.while_present(self.forward(client, body))
            recording = self.recordings.start(
                owner_of(client.head, self.secret), client, lambda made: self._record(made, body, client.address)
            )
            recording.body_bytes = len(body)
            if is_async:
                return await accepted(recording, client)
            with contextlib.suppress(ClientGone):  # the stream goes on without it
                await client.while_present(tell(recording, client, 0))

    async def _record(self, recording: Recording, body: bytes, address: str) -> None:
        with self.limits.held(recording.head, address):
            await self._answered(recording, self.forward(recording, body))

    async def forward(self, client: Listener, body: bytes) -> None:
        reading = await self.reading(client.head, body, client.address)
        await self._through(client, self._exchange(client, body, reading))

    async def reading(self, head: Head, body: bytes, address: str) -> Reading:
        """Raises ApiError."""
        return await aside_if_large(body, read, look(head, self.secret, self.relay.max_hops, address), body)

    def _exchange(self, client: Listener, body: bytes, reading: Reading | None = None) -> Exchange:
        started_at = self._clock()
        request = self.parsed(client.head, body, client.request_id, client.address, reading)
        self.retries.deposit()
        self.limits.charge(client.head, request.conversation.tokens)
        return Exchange(request, self.relay, started_at)

    async def _through(self, client: Listener, exchange: Exchange) -> None:
        try:
            await self._try_sites(client, exchange)
        finally:
            self.limits.charge(client.head, exchange.told_tokens)

    async def _try_sites(self, client: Listener, exchange: Exchange) -> None:
        while (asked := exchange.take_asked() or await self._ask_next(client, exchange)) is not None:
            preference, backend = asked.preference, self.backends[asked.preference.backend.name]
            with asked.ticket as ticket:
                try:
                    answer = await self._answer(exchange, asked)
                except SiteFailed as failure:
                    self._note(backend, ticket, exchange, failure)
                    exchange.failed(backend.name, failure)
                    if not exchange.request.head.may_be_repeated and failure.kind not in UNTOUCHED:
                        sentence = f"the site {backend.name} was lost while the function ran: {failure.detail}"
                        raise ApiError("upstream_lost", sentence) from None
                    continue
                async with answer:
                    ticket.answering()
                    elapsed_s = self._clock() - exchange.started_at
                    try:
                        return await self._relay(client, exchange, answer, preference, elapsed_s)
                    except Lost as lost:
                        if answer.is_opaque:  # its client learns from a response without an end
                            return self.metrics.ended(backend.name, "lost")
                        if not self._cut(exchange, answer, backend, lost):
                            break
        await self._give_up(client, exchange)

    def rank(self, request: ValidRequest) -> tuple[RouteRequest, list[Preference]]:
        route = request.route(self.sessions.recall(request.conversation), self._clock())
        return route, self.policy.rank(route, [backend.view() for backend in self.backends.values()])

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, lets open requests finish, and ends those that have not when the time is up."""
        self.is_draining = True
        deadline = self._clock() + timeout_s
        while self._open and self._clock() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        for client in tuple(self._open):
            client.cut(ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1))
        deadline = self._clock() + LAST_WORDS_S
        while self._open and self._clock() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    def check(self, head: Head) -> None:
        """Raises ApiError on what is not taken, whatever its body."""
        if self.is_draining:
            raise ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1)
        if not head.is_for_function:  # each time, though the head be known: a key may have been withdrawn since
            self._access.check_client(head.header("authorization"))
        if head.is_sound:
            return
        if head.path in MODEL_LISTS and head.method not in ("GET", "HEAD", "OPTIONS"):
            raise ApiError("method_not_allowed", f"{head.path[:200]} does not take {head.method}: GET lists the models")
        if ".." in head.path and ".." in head.path.split("/"):
            raise ApiError("not_found", "a path must not contain '..'")
        if not _PLAIN_TARGET.fullmatch(head.target):
            raise ApiError("invalid_request", "a path must be printable ASCII: encode everything else as %XX")
        force_setattr(head, "is_sound", True)

    def parsed(
        self, head: Head, body: bytes, request_id: str, address: str, reading: Reading | None = None
    ) -> ValidRequest:
        place, max_hops = self.places.place, self.relay.max_hops
        return peek(head, body, request_id, self.secret, max_hops, place, address, reading)

    async def _body(self, client: Downstream) -> bytes:
        return await client.body(self._max_body_bytes, self.relay.idle_timeout_s, self.body_timeout_s)

    async def _ask_next(self, client: Listener, exchange: Exchange) -> Asked | None:
        """The best site not yet tried. Ranked anew each time: while one kept us waiting, others have failed, and others have come back."""
        if exchange.failures and exchange.lost is None and not (exchange.is_paid or self.retries.withdraw()):
            return None
        exchange.is_paid = False
        while not exchange.is_out_of_tries(self._clock()):
            route, preferences = self.rank(exchange.request)
            self._consider_hints(exchange, route, preferences)
            left = (preference for preference in preferences if preference.backend.name not in exchange.tried)
            if (preference := next(left, None)) is not None:
                return self._ask(client, exchange, route, preference)
            if exchange.take_back_declined():
                continue
            if exchange.lost is None:
                return None
            await asyncio.sleep(TRY_AGAIN_S)
            exchange.try_again()
        return None

    def _ask(self, client: Listener, exchange: Exchange, route: RouteRequest, preference: Preference) -> Asked:
        assert self.upstream is not None
        backend = self.backends[preference.backend.name]
        ticket = backend.inflight(route.uncached_tokens(backend.name))
        try:
            request = exchange.asks(preference.patience_ms)
            asking = Asking(
                self.upstream, backend.name, backend.url, request, exchange.patience_s(self._clock()), ticket,
                self.pace.first_stall_s(exchange, preference), lambda: self.pace.may_leave(exchange, backend),
            )  # fmt: skip
        except BaseException:
            ticket.give_back()
            raise
        asking.tell = partial(self._tell_first, client, exchange, preference)
        return Asked(preference, ticket, asking)

    def _consider_hints(self, exchange: Exchange, route: RouteRequest, preferences: list[Preference]) -> None:
        if self.hints is not None and exchange.is_at_first_try:
            self.hints.consider(route.model, preferences)

    async def _answer(self, exchange: Exchange, asked: Asked) -> Answer:
        answer = await asked.asking.answer()
        if exchange.lost is not None and not answer.has_marks:
            async with answer:
                raise SiteFailed("refused", f"it answered {answer.status} instead of continuing the stream")
        return answer

    def _tell_first(self, client: Listener, exchange: Exchange, preference: Preference, answer: Answer) -> bool:
        """The head and the first events of a new stream, from where they came in, to a client that can take them now."""
        if exchange.lost is not None or not client.may_begin:
            return False
        if ready := exchange.ready(answer.first, answer.has_marks):
            client.begin_now(answer.status, _headers(client, exchange, answer, preference), ready)
            exchange.told_at = self._clock()
        return True

    async def _relay(
        self, client: Listener, exchange: Exchange, answer: Answer, preference: Preference, elapsed_s: float
    ) -> None:
        """To the answer's end; what can be learnt from its beginning waits until the client has that. Raises Lost."""
        site, journal, has_marks = preference.backend.name, exchange.journal, answer.has_marks
        if answer.body is not None:
            self._learn(exchange, preference, answer, elapsed_s)
            exchange.whole_tokens = answer.completion_tokens
            self.metrics.ended(site, _outcome(answer.status))
            return await client.whole(answer.status, _headers(client, exchange, answer, preference), answer.body)
        if not client.is_streaming:
            await client.begin_stream(answer.status, _headers(client, exchange, answer, preference))
        has_learnt = False

        def passed_on(events: list[Event]) -> list[Event] | None:
            """What finds the client ready and asks for no decision."""
            if not client.is_ready or events[-1].is_done:
                return events
            if ready := exchange.ready(events, has_marks):
                client.events_now(ready)
                self._told(exchange, site)
            return None if journal.broken is None and not journal.site_is_draining else []

        def plain_on(event: PlainEvent) -> bool:
            if not (client.is_ready and journal.passes(event)):
                return False
            client.events_now(event.told)
            self._told(exchange, site)
            return True

        def is_frozen() -> bool:
            return self.backends[site].is_frozen

        def is_stalled(silent_s: float) -> bool:
            return self.pace.is_stalled(exchange, self.backends[site], silent_s)

        async with aclosing(answer.batches(is_frozen, is_stalled, passed_on, plain_on)) as batches:
            async for events in batches:
                if ready := exchange.ready(events, has_marks):
                    await client.events(ready)
                    self._told(exchange, site)
                if not has_learnt:
                    has_learnt = True
                    self._learn(exchange, preference, answer, elapsed_s)
                if journal.broken is not None:
                    raise Lost("malformed", f"it sent {journal.broken}")
                last = events or answer.first
                if journal.site_is_draining and not (last and last[-1].is_done):
                    self._hand_over(exchange, self.backends[site])
        if (words := journal.last_words) is not None:
            if is_sites_own_fault(words):
                raise Lost("error", f"it ended with {(words.data or b'')[:300].decode(errors='replace')}")
            await client.events(journal.rest())
        self.metrics.ended(site, _outcome(answer.status))
        await client.end_stream()

    def _told(self, exchange: Exchange, site: str) -> None:
        now = self._clock()
        if exchange.is_cut:
            exchange.is_cut = False
            exchange.went_on_at = now
            self.metrics.stream_continued(site, now - exchange.told_at)
        exchange.told_at = now

    def _hand_over(self, exchange: Exchange, backend: Backend) -> None:
        """The site drains: its stream moves at once where there is another site for it. Where there is none, it may finish while it can."""
        backend.refused_draining()
        now = self._clock()
        if now < exchange.look_again_at:
            return
        exchange.look_again_at = now + TRY_AGAIN_S
        _, preferences = self.rank(exchange.request)
        if any(preference.serves(exchange.request.model) for preference in preferences):
            raise Lost("draining", "it is draining")

    def _cut(self, exchange: Exchange, answer: Answer, backend: Backend, lost: Lost) -> bool:
        """Whether the stream can go on elsewhere."""
        self.metrics.stream_disturbed(backend.name, lost.cause)
        log.log(
            logging.INFO if lost.cause == "draining" else logging.WARNING,
            "request %s: site %s was lost in mid-stream: %s", exchange.request.request_id, backend.name, lost,
        )  # fmt: skip
        try:
            exchange.cut(backend.name, lost, self._clock())
        except ContinuationError as error:
            log.warning("request %s: %s", exchange.request.request_id, error)
            return False
        return answer.has_marks and exchange.may_be_cut_again

    async def _give_up(self, client: Listener, exchange: Exchange) -> None:
        if exchange.lost is None:
            raise nothing_left(exchange.failures, self.backends)
        self.metrics.ended(exchange.lost_site, "lost")
        self.metrics.stream_lost(exchange.lost_site)
        await client.refuse(exchange.end_of_stream())

    def _note(self, backend: Backend, ticket: Ticket, exchange: Exchange, failure: SiteFailed) -> None:
        """What a failed try says about the site."""
        log.info("site %s failed before its first byte: %s", backend.name, failure.detail)
        self.metrics.tried(backend.name, failure.kind)
        if failure.kind == "declined":
            ticket.answering()  # it is well, and said so
            backend.declined(exchange.request.model or "", failure.queued_tokens, ticket.sent_at)
        elif failure.kind == "no_model" or (failure.kind == "full" and exchange.request.head.is_for_function):
            ticket.answering()  # nothing is wrong with it where its other models, or functions, are concerned
        elif failure.kind in ("untrusted", "no_files"):
            ticket.answering()  # its probes, which are signed as well, will tell; and it is not to blame for our own limits
        elif failure.kind == "connect":
            backend.failed(failure.detail)
        elif failure.kind == "draining":
            backend.refused_draining()

    def _learn(self, exchange: Exchange, preference: Preference, answer: Answer, elapsed_s: float) -> None:
        """What a begun answer says: where the conversation lives now, and how good the prediction was."""
        self.metrics.tried(preference.backend.name, "answered")
        self.metrics.decided(preference)
        if answer.status < 400:
            self.sessions.learn(exchange.request.conversation, preference.backend.name)
            if answer.body is None and exchange.is_at_first_try:
                self.metrics.first_token(preference, elapsed_s)


def _headers(client: Listener, exchange: Exchange, answer: Answer, preference: Preference) -> list[tuple[str, str]]:
    headers = [pair for pair in answer.headers if pair[0] != REQUEST_ID]
    headers += [(REQUEST_ID, client.request_id), (ROUTE, preference.explained(len(exchange.failures) + 1))]
    return headers


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
