"""One request through the router, in one task: handle, admit, forward, try_sites, relay.

A failing site costs the client only time: before its first byte the next site answers, after it the next site continues the same answer. When no site
is left, an error event ends the stream. Policy, probes and HTTP are in other modules.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, assert_never

from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.admission.filter import AdmissionFilter
from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.forwarding.downstream import Downstream, DownstreamGone, ResponseWriter
from pilotlight.edge_router.forwarding.relay import Forward, SiteDraining, StreamBroken, StreamDone
from pilotlight.edge_router.forwarding.request_state import Close, RecordedAnswer, RequestState, Stage, StreamRecovery
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost
from pilotlight.edge_router.forwarding.upstream import SiteConnections, UpstreamAttempt, UpstreamResponse
from pilotlight.edge_router.requests.request import RequestParser, ValidRequest, aside_if_large
from pilotlight.edge_router.routing.selection import AttemptPace, SiteSelector
from pilotlight.edge_router.routing.views import Preference
from pilotlight.edge_router.telemetry.metrics import NO_SITE, RouterMetrics
from pilotlight.edge_router.telemetry.recent_requests import RecentRequests
from pilotlight.sites.network import RelayConfig
from pilotlight.support.logs import REQUEST
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import ContinuationError
from pilotlight.wire.hop.headers import REQUEST_ID, ROUTE
from pilotlight.wire.hop.meters import MeterSlot

HOLDER = "pilotlight.holder"  # key in the scope of an admitted request: the configured key that admission found
DRAIN_POLL_S = 0.05
# Kinds of failure in which the site has not started the request.
UNTOUCHED = ("connect", "full", "draining", "no_model", "untrusted", "no_files")
LAST_WORDS_S = 1.0  # time to send the error events of streams that a drain cuts

Relay = Callable[[RequestState, UpstreamResponse, Preference], Awaitable[None]]

log = logging.getLogger(__name__)


class Proxy:
    """An ASGI application for all that is forwarded to sites."""

    def __init__(
        self,
        config: RelayConfig,
        admission: AdmissionFilter,
        parser: RequestParser,
        selector: SiteSelector,
        metrics: RouterMetrics,
        upstream: SiteConnections,
        clock: Callable[[], float],
        *,
        body_timeout_s: float,
        stages: Iterable[Stage],
        recent: RecentRequests,
    ) -> None:
        self.config = config
        self.admission = admission
        self.parser = parser
        self.selector = selector
        self.metrics = metrics
        self.upstream = upstream  # open while the application runs
        self._stages = tuple(stages)
        self._recent = recent
        self._clock = clock
        self.body_timeout_s = body_timeout_s
        self.under_way: set[RequestState] = set()
        self.ended_tokens = 0  # tokens of answers that have ended
        self._open: set[ResponseWriter] = set()
        metrics.watch("open_requests", "Requests in progress.", lambda: len(self._open))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        client = Downstream(scope, receive, send)
        return self.handle(client, self.admit(client))

    async def handle(self, client: ResponseWriter, work: Coroutine[Any, Any, None]) -> None:
        """Run a request's work; count its outcome and send an error response if it fails."""
        watched = self.upstream.silence.watched
        REQUEST.set(client.request_id)
        self._open.add(client)
        watched.add(client)
        try:
            await work
        except DownstreamGone:
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
            watched.discard(client)

    def admitted(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer a request that was admitted before (response_door.py), as an ASGI application."""
        client = Downstream(scope, receive, send)
        client.head.hold(scope[HOLDER])
        if client.recorded is not None:
            client.head.usage_id = client.recorded.response.id
        return self.handle(client, self._read_and_forward(client))

    async def admit(self, client: Downstream) -> None:
        with await self.admission.admit(client.head, client.address):
            await self._read_and_forward(client)

    async def _read_and_forward(self, client: Downstream) -> None:
        setting = "max_function_body_mib" if client.head.is_for_function else "max_body_mib"
        limit = int(getattr(self.config, setting) * 2**20)
        body = await client.body(limit, self.config.idle_timeout_s, self.body_timeout_s, setting)
        await client.while_present(self.forward(client, body, client.recorded))

    async def forward(self, client: ResponseWriter, body: bytes, recorded: RecordedAnswer | None = None) -> None:
        request = await aside_if_large(body, self.parser.parse, client.head, body, client.request_id, client.address)
        proxied = self.proxied(request, recorded)
        closing: list[Close] = []
        try:
            for stage in self._stages:
                if (close := await stage(proxied)) is not None:
                    closing.append(close)
            proxied.admitted()
            self.under_way.add(proxied)
            if proxied.is_continued:
                proxied.continue_answer(self._clock())
            await self.try_sites(client, proxied, partial(self.relay, client))
        finally:
            # A variable of this frame that held the exception would keep both, with all of the request, until a garbage collection.
            self._close(proxied, closing, sys.exception())

    def _close(self, proxied: RequestState, closing: Sequence[Close], error: BaseException | None) -> None:
        self.under_way.discard(proxied)
        self.ended_tokens += proxied.delivered_tokens
        took_s = self._clock() - proxied.started_at
        for close in reversed(closing):
            close(error, took_s)
        self._recent.note(proxied, error, took_s)

    def set_stages(self, stages: Iterable[Stage]) -> None:
        """Run later requests through these stages."""
        self._stages = tuple(stages)

    def proxied(self, request: ValidRequest, recorded: RecordedAnswer | None = None) -> RequestState:
        self.selector.retries.deposit(request.head.owner)
        upstream = self.upstream
        most_bytes, pauses = upstream.limits.max_delivered_bytes, upstream.silence.pauses
        return RequestState(request, self.config, self._clock(), most_bytes, pauses, recorded)

    async def try_sites(self, client: ResponseWriter, proxied: RequestState, relay: Relay) -> None:
        """Try sites in order of preference; `relay` forwards a site's response. Raises ApiError if all fail."""
        selector = self.selector
        while (choice := await selector.next_site(proxied)) is not None:
            route, preference = choice
            backend = selector.backends[preference.backend.name]
            attempt = self._attempt(self.upstream, proxied, backend, preference)
            tokens, expected_ms = route.uncached_tokens(backend.name), proxied.expected_ms(preference)
            with backend.inflight(tokens, attempt.site_lost, expected_ms) as ticket:
                try:
                    response = await attempt.response()
                    if response.failure is not None and self._may_be_the_sites(proxied, backend, response.failure):
                        with response:
                            raise response.failure
                except SiteFailed as failure:
                    selector.note_failure(backend, ticket, proxied.request, failure)
                    proxied.tries.failed(backend.name, failure, is_draining=backend.state == "draining")
                    if proxied.trace is not None:
                        proxied.trace.end_try(failure.kind)
                    if not proxied.request.head.may_be_repeated and failure.kind not in UNTOUCHED:
                        sentence = f"the site {backend.name} was lost while the function ran: {failure.detail}"
                        raise ApiError("upstream_lost", sentence) from None
                    continue
                with response:
                    ticket.answering()
                    try:
                        return await relay(proxied, response, preference)
                    except StreamLost as lost:
                        if response.is_opaque:
                            return self.metrics.ended(backend.name, "lost")
                        if not self._may_go_on(proxied, response, backend, lost):
                            break
        await self._give_up(client, proxied)

    async def relay(
        self, client: ResponseWriter, proxied: RequestState, response: UpstreamResponse, preference: Preference
    ) -> None:
        """Forward one site's response to its end. Bookkeeping runs after the first byte is written.
        Raises StreamLost."""
        site, elapsed_s = preference.backend.name, self._clock() - proxied.started_at
        proxied.answered_by(site, response.status, is_stream=response.body is None, elapsed_s=elapsed_s)
        # Called in the next iteration of the event loop, so that the first byte is written before.
        asyncio.get_running_loop().call_soon(self.selector.note_answer, proxied, preference, response, elapsed_s)
        route = preference.explained(len(proxied.tries.failures) + 1)
        route += f"; {response.route}" if response.route else ""
        headers = [*response.headers, (REQUEST_ID, client.request_id), (ROUTE, route)]
        if response.body is not None:
            await self._relay_whole(client, proxied, response, response.body, headers)
        else:
            await self._relay_stream(client, proxied, response, headers)
        proxied.is_complete = True

    async def _relay_whole(
        self,
        client: ResponseWriter,
        proxied: RequestState,
        response: UpstreamResponse,
        body: bytes,
        headers: list[tuple[str, str]],
    ) -> None:
        if proxied.request.model is not None:  # the contents of a function's answer are not read
            proxied.answered_whole(response.use)
        self.metrics.ended(proxied.site, _outcome(response.status))
        if proxied.log.meter is not None:
            proxied.log.meter.sends(len(body))
        await client.respond(response.status, headers, body)

    async def _relay_stream(
        self,
        client: ResponseWriter,
        proxied: RequestState,
        response: UpstreamResponse,
        headers: list[tuple[str, str]],
    ) -> None:
        selector, site, recovery, meter = self.selector, proxied.site, proxied.recovery, proxied.log.meter
        if not client.is_streaming:
            await client.start_stream(response.status, headers)
        forwarder = _Forwarder(client, meter, recovery, self._clock)
        async for events in response:
            for event in events:
                match event:
                    case Forward():
                        if meter is not None:
                            meter.sends(len(event.data))
                        await client.write(event.data)
                        # later Forward events go to `forwarder` without waking this task
                        response.forward_by(forwarder)
                        waited_s = recovery.delivered(self._clock())
                        if waited_s is not None and recovery.lost is not None:
                            self.metrics.stream_continued(recovery.lost_site, recovery.lost.cause, site, waited_s)
                    case SiteDraining():
                        if selector.is_wanted_elsewhere(proxied, selector.backends[site]):
                            raise StreamLost("draining", "it is draining")
                    case StreamBroken():
                        raise StreamLost(event.cause, event.detail)
                    case StreamDone():
                        client.note_last_event()
                    case _:
                        assert_never(event)
        self.metrics.ended(site, _outcome(response.status))
        await client.end_stream()

    def _attempt(
        self, upstream: SiteConnections, proxied: RequestState, backend: Backend, preference: Preference
    ) -> UpstreamAttempt:
        pace = self._pace(proxied, backend)
        now = self._clock()
        limits = proxied.attempt_limits(pace.first_stall_s(preference), now)
        request = proxied.ask(preference.max_queue_ms, now)
        if proxied.trace is not None:
            request = proxied.trace.begin_try(backend.name, request)
        return UpstreamAttempt(upstream, backend.name, backend.url, request, limits, pace, proxied.log)

    def _pace(self, proxied: RequestState, backend: Backend) -> AttemptPace:
        return AttemptPace(proxied, backend, self.config, self.selector.rank, self.selector.retries)

    def _may_be_the_sites(self, proxied: RequestState, backend: Backend, failure: SiteFailed) -> bool:
        """Tell whether to ask another site after a plain failure, which may be the site's fault.
        If two sites answer with the same error, the request is at fault."""
        has_said_so = any(each.detail == failure.detail for each in proxied.tries.failures.values())
        return not has_said_so and self._pace(proxied, backend).may_leave()

    def _may_go_on(self, proxied: RequestState, response: UpstreamResponse, backend: Backend, lost: StreamLost) -> bool:
        """Mark the stream as cut; return whether it can continue at another site."""
        self.metrics.stream_disturbed(backend.name, lost.cause)
        if proxied.trace is not None:
            proxied.trace.end_try(lost.cause)
        log.log(
            logging.INFO if lost.cause == "draining" else logging.WARNING,
            "request %s: site %s was lost in mid-stream: %s", proxied.request.request_id, backend.name, lost,
        )  # fmt: skip
        try:
            proxied.cut(backend.name, lost, self._clock())
        except ContinuationError as error:
            log.warning("request %s: %s", proxied.request.request_id, error)
            return False
        return response.is_resumable and proxied.recovery.may_be_cut_again

    async def _give_up(self, client: ResponseWriter, proxied: RequestState) -> None:
        if proxied.recovery.lost is None:
            tries = proxied.tries
            raise self.selector.nothing_left(proxied.request, tries.failures, tries.repeated)
        self.metrics.ended(proxied.recovery.lost_site, "lost")
        self.metrics.stream_lost(proxied.recovery.lost_site)
        await client.refuse(proxied.end_of_stream())

    async def idle(self, within_s: float) -> None:
        """Wait until no request is open, at most `within_s` seconds."""
        deadline = self._clock() + within_s
        while self._open and self._clock() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let open ones finish, and end the rest after the timeout."""
        self.admission.is_draining = True
        await self.idle(timeout_s)
        for client in tuple(self._open):
            client.cut(ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1))
        await self.idle(LAST_WORDS_S)


class _Forwarder:
    """Send a stream's events to its client as they arrive, and record that they were sent."""

    def __init__(
        self, client: ResponseWriter, meter: MeterSlot | None, recovery: StreamRecovery, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._meter = meter
        self._recovery = recovery
        self._clock = clock

    def forward(self, data: bytes) -> bool:
        if not self._client.write_now(data):
            return False
        if self._meter is not None:
            self._meter.sends(len(data))
        self._recovery.delivered(self._clock())
        return True


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
