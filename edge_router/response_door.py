"""Admission of requests for stored responses, with the limits and timeouts of other requests.

A request that calls a model is counted once.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream, DownstreamGone, head_of
from pilotlight.edge_router.forwarding.proxy import ADMITTED, Proxy
from pilotlight.edge_router.telemetry.metrics import NO_SITE
from pilotlight.response_store.app import AdmittedRequest
from pilotlight.wire.errors import ApiError


class ResponseDoor:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @asynccontextmanager
    async def admitted(self, scope: Scope, receive: Receive, send: Send) -> AsyncIterator[AdmittedRequest]:
        """Open a scope for the duration of a request. Raises ApiError if the request is not admitted."""
        client, admission = Downstream(scope, receive, send), self._proxy.admission
        try:
            with await admission.admit(client.head, client.address) as admitted:
                scope[ADMITTED] = admitted
                yield AdmittedRequest(client.head.owner, partial(self._body, client))
        except ApiError as error:
            self._proxy.metrics.ended(NO_SITE, error.word)
            raise

    @contextmanager
    def held(self, scope: Scope) -> Iterator[None]:
        """Open a scope in which a background response counts as open.

        Its client's request no longer counts. Raises ApiError."""
        head, address = head_of(scope), str(scope["client"][0]) if scope.get("client") else ""
        self._proxy.admission.identify(head)
        with self._proxy.admission.limits.held(head, address) as held:
            scope[ADMITTED].close()
            scope[ADMITTED] = held
            yield

    async def _body(self, client: Downstream, limit: int) -> bytes:
        """Return the request's body. Raises ApiError, ClientDisconnect."""
        proxy = self._proxy
        watched = proxy.upstream.silence.watched
        watched.add(client)
        try:
            return await client.body(limit, proxy.config.idle_timeout_s, proxy.body_timeout_s)
        except DownstreamGone:
            raise ClientDisconnect from None
        finally:
            watched.discard(client)
