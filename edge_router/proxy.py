"""The way of one request through the router: read, rank, ask one site after the other until one begins to answer, relay.

Before a site's first byte a failure costs the client nothing but time; after it, an honest error event ends the stream. Knows no policy, no
probes and no HTTP client: it joins them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from edge_router.backend import Backend, Ticket
from edge_router.downstream import ClientGone, Downstream
from edge_router.metrics import NO_SITE, RouterMetrics
from edge_router.peek import ValidRequest, hop_secret, peek, request_id_of
from edge_router.policy import Policy, Preference, RouteRequest
from edge_router.session import SessionTable
from edge_router.upstream import Answer, Lost, SiteFailed, Upstream
from sites.config import RelayConfig
from wire.errors import ApiError
from wire.headers import REQUEST_ID, ROUTE

PREFIXES = ("/ai/v1/", "/v1/", "/client/v4/")  # what is forwarded
MAX_RETRY_AFTER_S = 60.0
DRAIN_POLL_S = 0.05
LAST_WORDS_S = 1.0  # for the error events of streams that a drain cuts

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
        clock: Callable[[], float],
    ) -> None:
        self.relay = relay
        self.backends = backends
        self.policy = policy
        self.sessions = sessions
        self.metrics = metrics
        self.upstream: Upstream | None = None  # open while the application runs
        self.is_draining = False
        self.secret = hop_secret()
        self._clock = clock
        self._open: set[Downstream] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        client.request_id = request_id_of(client.head)
        self._open.add(client)
        self.metrics.open_requests.inc()
        try:
            body = await self._body(client)
            await client.while_present(self.forward(client, body))
        except ClientGone:
            self.metrics.ended(NO_SITE, "client_gone")
        except ApiError as error:
            self.metrics.ended(NO_SITE, error.word)
            await client.refuse(error)
        except Exception:
            log.exception("request %s failed inside the router", client.request_id)
            self.metrics.ended(NO_SITE, "internal_error")
            await client.refuse(
                ApiError("internal_error", "the router failed; its log has the reason under this request id")
            )
        finally:
            self.metrics.open_requests.dec()
            self._open.discard(client)

    async def forward(self, client: Downstream, body: bytes) -> None:
        assert self.upstream is not None
        started_at = self._clock()
        request = peek(client.head, body, client.request_id, self.secret, self.relay.max_hops)
        failures: list[tuple[str, SiteFailed]] = []
        while (choice := self._next_choice(request, failures)) is not None:
            route, preference = choice
            backend = self.backends[preference.backend.name]
            with backend.inflight(route.uncached_tokens(backend.name)) as ticket:
                try:
                    answer = await self._ask(self.upstream, backend, ticket, request)
                except SiteFailed as failure:
                    self._note(backend, failure)
                    failures.append((backend.name, failure))
                    continue
                async with answer:
                    ticket.answering()
                    tries = len(failures) + 1
                    self._learn(request, preference, answer, tries, self._clock() - started_at)
                    return await self._relay(client, answer, preference, tries)
        raise self._nothing_left(failures)

    def rank(self, request: ValidRequest) -> tuple[RouteRequest, list[Preference]]:
        route = request.route(self.sessions.recall(request.conversation))
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

    async def _body(self, client: Downstream) -> bytes:
        if self.is_draining:
            raise ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1)
        if ".." in client.head.path.split("/"):
            raise ApiError("not_found", "a path must not contain '..'")
        return await client.body(int(self.relay.max_body_mib * 2**20), self.relay.idle_timeout_s)

    def _next_choice(
        self, request: ValidRequest, failures: Sequence[tuple[str, SiteFailed]]
    ) -> tuple[RouteRequest, Preference] | None:
        """The best site not yet tried. Ranked anew each time: while one kept us waiting, others have failed, and others have come back."""
        if len(failures) >= self.relay.max_tries:
            return None
        tried = {site for site, _ in failures}
        route, preferences = self.rank(request)
        left = (preference for preference in preferences if preference.backend.name not in tried)
        preference = next(left, None)
        return None if preference is None else (route, preference)

    async def _ask(self, upstream: Upstream, backend: Backend, ticket: Ticket, request: ValidRequest) -> Answer:
        """A site that stops answering its probes while we wait for its first byte is left at once: a machine that froze or a cable that was cut
        closes no connection."""
        try:
            async with asyncio.timeout(None) as patience:
                ticket.on_site_lost = lambda: patience.reschedule(0)  # a moment long past: the patience ends now
                return await upstream.ask(backend.url, request)
        except TimeoutError:
            raise SiteFailed("silent", f"it became unhealthy before its first byte: {backend.detail}") from None
        finally:
            ticket.on_site_lost = None

    async def _relay(self, client: Downstream, answer: Answer, preference: Preference, tries: int) -> None:
        site = preference.backend.name
        headers = [pair for pair in answer.headers if pair[0] != REQUEST_ID]
        headers += [(REQUEST_ID, client.request_id), (ROUTE, explain(preference, tries))]
        if answer.body is not None:
            self.metrics.ended(site, _outcome(answer.status))
            return await client.whole(answer.status, headers, answer.body)
        await client.begin_stream(answer.status, headers)
        try:
            async with aclosing(answer.batches()) as batches:
                async for batch in batches:
                    await client.events(batch)
        except Lost as lost:
            self.metrics.ended(site, "lost")
            log.warning("request %s: site %s was lost in mid-stream: %s", client.request_id, site, lost)
            return await client.refuse(
                ApiError("upstream_lost", f"the site {site} was lost before the end of its answer: {lost}")
            )
        self.metrics.ended(site, _outcome(answer.status))
        await client.end_stream()

    def _note(self, backend: Backend, failure: SiteFailed) -> None:
        """What a failed try says about the site."""
        log.info("site %s failed before its first byte: %s", backend.name, failure.detail)
        self.metrics.tried(backend.name, failure.kind)
        if failure.kind == "connect":
            backend.failed(failure.detail)
        elif failure.kind == "draining":
            backend.refused_draining()

    def _learn(
        self, request: ValidRequest, preference: Preference, answer: Answer, tries: int, elapsed_s: float
    ) -> None:
        """What a begun answer says: where the conversation lives now, and how good the prediction was."""
        self.metrics.tried(preference.backend.name, "answered")
        self.metrics.decided(preference)
        if answer.status < 400:
            self.sessions.learn(request.conversation, preference.backend.name)
            if answer.body is None and tries == 1:
                self.metrics.first_token(preference, elapsed_s)

    def _nothing_left(self, failures: Sequence[tuple[str, SiteFailed]]) -> ApiError:
        if failures:
            tried = "; ".join(f"{site}: {failure.detail}" for site, failure in failures)
            sentence = f"no site could answer; tried {tried}"
        else:
            states = "; ".join(
                f"{backend.name} is {backend.state}: {backend.detail}" for backend in self.backends.values()
            )
            sentence = f"no site is available; {states}"
        hints = [failure.retry_after_s for _, failure in failures if failure.retry_after_s is not None]
        return ApiError("no_site_available", sentence, retry_after_s=min([*hints, MAX_RETRY_AFTER_S]) if hints else 1.0)


def explain(preference: Preference, tries: int) -> str:
    """The decision in a header: `site=ams1; cost=12.3; rtt=0.4; ...; tries=1; reason=home`."""
    terms = "".join(f"; {name}={value:.1f}" for name, value in preference.terms.items())
    return f"site={preference.backend.name}; cost={preference.cost_ms:.1f}{terms}; tries={tries}; reason={preference.reason}"


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
