"""Middleware of every route: authentication, request id, the site's name, and error responses.

A request id is accepted only with the valid signature of a router of the network: otherwise clients could choose ids that mislead in the logs.
GENUINE_HOP in the scope records whether the signature is valid. Errors are sent in the dialect of the path; unexpected ones are also logged.
"""

import hashlib
import logging
import os
import time
from contextlib import nullcontext
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from pilotlight.runtime.api.connection import AnswerCut, answering, send_error
from pilotlight.runtime.telemetry.metrics import Metrics
from pilotlight.runtime.telemetry.tracing import RequestSpan, SiteTracing
from pilotlight.support.logs import REQUEST
from pilotlight.wire.credentials import Access, with_bearer
from pilotlight.wire.errors import ApiError, dialect_of
from pilotlight.wire.hop import headers
from pilotlight.wire.http.asgi import header
from pilotlight.wire.paths import normalize_path, nothing_at

GENUINE_HOP = "pilotlight.genuine_hop"  # key in the scope: whether a router of the network has signed the request
SITE_NAME = "pilotlight.site"  # key in the scope: this site's name
ACCOUNT = "pilotlight.account"  # key in the scope: the account's name; empty if it is unknown
HOLDER = "pilotlight.holder"  # key in the scope: the API key, if the client sent this site a known one
PUBLIC_PATHS = ("/livez", "/readyz", "/health", "/ping", "/version", "/api/version", "/openapi.json", "/docs")
# Paths that, where keys or signatures are required, only routers and keys with the scope `metrics` may read.
METRICS_PATHS = ("/metrics", "/status", "/timeline")
INTERNAL = "/internal/"
PAGE = ("/page/", "/manage/")  # protected by the page's own sessions
FUNCTIONS = "/fn/"  # functions authenticate their own callers
MODELS_AS_FUNCTIONS = "/fn/@"  # functions that run a model need a key, like all models
OWN_PATHS = PUBLIC_PATHS + METRICS_PATHS
OLLAMA_ANSWERS = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")
LOGGED_EVERY_S = 60.0  # interval of log lines about refused requests, for each kind of refusal
BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")

log = logging.getLogger("pilotlight.http")


class HopRefused(ApiError):
    """A refusal because of a router's signature or clock: sent to the router, and logged for the operator."""

    def __init__(self, fault: str, message: str, clock: str = "") -> None:
        """`clock` is this site's signed time, for a router whose clock differs; else empty."""
        super().__init__("forbidden", message)
        self.fault, self._clock = fault, clock

    def headers(self) -> list[tuple[str, str]]:
        return [(headers.REFUSAL, self.fault), *([(headers.CLOCK, self._clock)] if self._clock else ())]


class SiteMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        site: str,
        hop_secret: str | None,
        require_hop: bool,
        access: Access,
        metrics: Metrics,
        tracing: SiteTracing | None = None,
        functions_path: str = FUNCTIONS,
    ) -> None:
        self._app = app
        self._site = site
        self._hop_secret = hop_secret
        self._require_hop = require_hop
        self._access = access
        self._metrics = metrics
        self._tracing = tracing
        self._functions_path = functions_path
        self._logged_at: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_for_function = scope["path"].startswith(self._functions_path)
        if not is_for_function:
            scope["headers"] = with_bearer(scope["headers"])
        refusal: ApiError | None = None
        try:
            request_id, digest = self._request_id(scope)
        except ApiError as error:
            request_id, digest, refusal = os.urandom(16).hex(), None, error
            if isinstance(error, HopRefused):
                self._log(error, scope)
        if not is_for_function:
            normalize_path(scope)  # the signature covers the path as it was sent
        is_genuine = digest is not None
        scope["pilotlight.request_id"] = request_id
        REQUEST.set(request_id)
        scope[GENUINE_HOP] = is_genuine
        scope[SITE_NAME] = self._site
        if is_genuine:
            scope[ACCOUNT] = header(scope, headers.ACCOUNT) or ""
        ours = [(headers.REQUEST_ID.encode(), request_id.encode()), (headers.SITE.encode(), self._site.encode())]
        if self._require_hop and not is_genuine and scope["path"] == "/status":
            # A router without a secret learns from its probes that this site requires signatures.
            ours.append((headers.REFUSAL.encode(), b"signature"))
        has_started = False
        span: RequestSpan | None = None

        async def named(message: Message) -> None:
            nonlocal has_started
            if message["type"] in BEGINNINGS:
                has_started = True
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
                self._metrics.response(_family(scope["path"]), message.get("status", 101))
                if span is not None:
                    span.answered(message.get("status", 101))
            await send(message)

        try:
            if refusal is not None:
                raise refusal
            checked = receive if digest is None else _checked(receive, digest)
            with nullcontext() if self._tracing is None else self._tracing.request(scope) as span:
                await self._app(scope, checked, named)
        except (ClientDisconnect, AnswerCut):
            return
        except Exception as error:
            if has_started:
                raise
            await send_error(
                answering(scope, named), _as_api_error(error, scope), dialect_of(scope["path"], scope["headers"])
            )

    def _request_id(self, scope: Scope) -> tuple[str, str | None]:
        """Return the router's request id and the digest of the body that it signed, or a new id and None.

        Raises ApiError if the signature is invalid, or missing although required."""
        signature = header(scope, headers.HOP)
        given = header(scope, headers.REQUEST_ID) or ""
        if self._hop_secret is not None and signature is not None:
            query = scope["query_string"].decode("latin-1")
            method = scope.get("method", "GET")  # a WebSocket's scope has no method
            hop = headers.Hop(method, scope["path"], given, self._site, query)
            digest = headers.signed_body(signature, self._hop_secret, time.time(), hop)
            if digest is not None:
                return given or os.urandom(16).hex(), digest
            age_s = headers.age_of_hop(signature, time.time())
            if age_s is None or not headers.hop_is_genuine(signature, self._hop_secret, time.time() - age_s, hop):
                sentence = f"the {headers.HOP} signature was made with another secret, or for another site or request"
                raise HopRefused("signature", sentence)
            when = f"{abs(age_s):.0f} s {'old' if age_s > 0 else 'ahead'}"
            sentence = f"the {headers.HOP} signature is {when} by this site's clock: set the clocks"
            raise HopRefused("clock", sentence, headers.tell_clock(self._hop_secret, time.time(), self._site, given))
        self._check_stranger(scope)
        return os.urandom(16).hex(), None

    def _check_stranger(self, scope: Scope) -> None:
        """Check a request without a router's signature; note the holder of its key. Raises ApiError."""
        path = scope["path"]
        authorization = header(scope, "authorization")
        if path in PUBLIC_PATHS:
            return
        if path in METRICS_PATHS or path.startswith(INTERNAL):
            if self._require_hop or self._access.is_required:
                self._access.key(authorization, "metrics" if path in METRICS_PATHS else "admin")
        elif self._require_hop:
            message = "this site answers only requests that come through one of the network's routers, and are signed"
            raise HopRefused("signature", message)
        elif path.startswith(MODELS_AS_FUNCTIONS) or (path != "/" and not path.startswith((FUNCTIONS, *PAGE))):
            holder = self._access.holder(authorization)
            if holder is not None:
                scope[HOLDER], scope[ACCOUNT] = holder, holder.account.name

    def _log(self, refused: HopRefused, scope: Scope) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(refused.fault, float("-inf")) >= LOGGED_EVERY_S:
            self._logged_at[refused.fault] = now
            log.warning("a request from %s was refused: %s", (scope.get("client") or ("nobody",))[0], refused.message)


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    if isinstance(error, ApiError):
        return error
    name, path = scope.get("method", "WebSocket"), scope["path"]
    log.error("%s %s (request %s)", name, path, scope["pilotlight.request_id"], exc_info=error)
    return ApiError("internal_error", "internal error at this site; see its log")


def _checked(receive: Receive, digest: str) -> Receive:
    """Return `receive` with a check: refuse the body if its digest differs from the signed one.

    The check runs at the body's end; by then, a route that streams the body has used the beginning of it."""
    hasher = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            hasher.update(message.get("body", b""))
            if not message.get("more_body", False) and hasher.hexdigest() != digest:
                raise HopRefused("signature", "the body differs from the signed one")
        return message

    return checked


def _family(path: str) -> str:
    """Return a metric label for a path; the set of labels is bounded."""
    for family in ("chat/completions", "completions", "messages", "responses", "embeddings", "models"):
        if path.endswith(f"/v1/{family}"):
            return family
    for family in ("rerank", "score", "classify"):
        if path.endswith((f"/v1/{family}", f"/v2/{family}")) or path == f"/{family}":
            return family
    if "/ai/run/" in path:
        return "run"
    return path.removeprefix("/") if path in (*OWN_PATHS, *OLLAMA_ANSWERS) else "other"


async def _no_path(request: Request, error: Exception) -> NoReturn:
    raise ApiError("not_found", nothing_at(request.scope["path"]))


async def _no_method(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
    raise ApiError(
        "method_not_allowed", f"{request.method} is not allowed on {request.scope['path']}; allowed: {allowed}"
    )


UNROUTED: dict[int, ExceptionHandler] = {404: _no_path, 405: _no_method}  # for an application inside this middleware
