"""Admission of requests for stored responses, with the limits and timeouts of other requests.

A request that calls a model is counted once. For a background response it can be continued by another router, which gets what it needs to know of
the client, without credentials.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream, DownstreamGone, head_of
from pilotlight.edge_router.forwarding.proxy import HOLDER, Proxy
from pilotlight.edge_router.forwarding.request_state import RECORDED, RecordedAnswer
from pilotlight.edge_router.telemetry.metrics import NO_SITE
from pilotlight.response_store.app import AdmittedRequest
from pilotlight.response_store.kept_responses import KeptResponse
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import AnswerName, decode_answer, encode_answer
from pilotlight.wire.hop.headers import REQUEST_ID, SESSION_AFFINITY
from pilotlight.wire.tracing import PARENT_HEADERS

ADMITTED = "pilotlight.admitted"  # key in a scope: the OpenRequest of an admitted request
_STORED = ("content-type", "prefer", SESSION_AFFINITY, REQUEST_ID, *PARENT_HEADERS)  # all other headers may be secrets


class ResponseDoor:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @asynccontextmanager
    async def admitted(self, scope: Scope, receive: Receive, send: Send) -> AsyncIterator[AdmittedRequest]:
        """Open a scope for the duration of a request. Raises ApiError if the request is not admitted."""
        client, admission = Downstream(scope, receive, send), self._proxy.admission
        try:
            with await admission.admit(client.head, client.address) as admitted:
                scope[ADMITTED], scope[HOLDER] = admitted, client.head.holder
                yield AdmittedRequest(client.head.owner, partial(self._body, client))
        except ApiError as error:
            self._proxy.metrics.ended(NO_SITE, error.word)
            raise

    @contextmanager
    def held(self, scope: Scope) -> Iterator[None]:
        """Open a scope in which a background response counts as open.

        Its client's request no longer counts."""
        head, address = head_of(scope), str(scope["client"][0]) if scope.get("client") else ""
        head.hold(scope[HOLDER])
        with self._proxy.admission.limits.held(head, address):
            if ADMITTED in scope:  # the request was not restored
                scope[ADMITTED].close()
            yield

    def recorded(self, scope: Scope, response: KeptResponse) -> dict[str, Any] | None:
        if not self._proxy.parser.secret:  # only signed answers can be continued
            return None
        head, holder, answer = head_of(scope), scope[HOLDER], AnswerName.fresh()
        scope[RECORDED] = RecordedAnswer(answer, response)
        return {
            "path": head.path, "target": head.target, "scheme": head.scheme, "address": str((scope.get("client") or [""])[0]),
            "headers": [(name, head.header(name)) for name in _STORED if head.has(name)],
            "answer": encode_answer(answer), "has_key": bool(head.key),
            "key": None if holder is None else holder.name, "account": "" if holder is None else holder.account.name,
        }  # fmt: skip

    def restored(self, client: dict[str, Any], response: KeptResponse, events: Sequence[bytes]) -> Scope:
        path, _, query = client["target"].partition("?")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in client["headers"]]
        if client["has_key"] and client["key"] is None:
            # An unknown key is not stored; this substitute gives its owner a separate prefix cache.
            headers.append((b"authorization", f"Bearer responses-of-{response.tenant}".encode()))
        return {
            "type": "http", "method": "POST", "path": client["path"], "raw_path": path.encode("latin-1"), "query_string": query.encode("latin-1"),
            "scheme": client["scheme"], "headers": headers, "client": (client["address"], 0),
            HOLDER: self._proxy.admission.access.named(client["key"], client["account"]),
            RECORDED: RecordedAnswer(decode_answer(client["answer"])[0], response, events),
        }  # fmt: skip

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
