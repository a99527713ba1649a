"""The middleware of every route: authentication, request id, the site's name, and error responses.

A request id from outside is kept only with a valid signature of one of the network's routers; other clients could mix up the logs. The scope then
records whether the hop is authentic. Failures are sent in the dialect of the path; unforeseen ones are also logged.
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

GENUINE_HOP = "pilotlight.genuine_hop"  # in the scope: a router of the network has signed this request
SITE_NAME = "pilotlight.site"  # in the scope
ACCOUNT = "pilotlight.account"  # key in the scope: the name of a known account; empty if none is known
HOLDER = "pilotlight.holder"  # key in the scope: the API key that was sent to this site itself, if it is known
PUBLIC_PATHS = ("/livez", "/readyz", "/health", "/ping", "/version", "/api/version", "/openapi.json", "/docs")
# Where keys or signatures are required, for routers and keys with the scope `metrics` alone.
METRICS_PATHS = ("/metrics", "/status", "/timeline")
INTERNAL = "/internal/"
PAGE = ("/page/", "/manage/")  # judge by the page's own sessions
FUNCTIONS = "/fn/"  # functions judge for themselves who may ask
MODELS_AS_FUNCTIONS = "/fn/@"  # models as services, which need a key like other models
OWN_PATHS = PUBLIC_PATHS + METRICS_PATHS
OLLAMA_ANSWERS = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")
LOGGED_EVERY_S = 60.0  # however many requests are refused
BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")

log = logging.getLogger("pilotlight.http")


class HopRefused(ApiError):
    """A refusal caused by the network itself: sent to the router, and logged for the operator."""

    def __init__(self, fault: str, message: str, clock: str = "") -> None:
        """`clock`: this site's time, signed, for a router of the network whose own differs."""
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
    ) -> None:
        self._app = app
        self._site = site
        self._hop_secret = hop_secret
        self._require_hop = require_hop
        self._access = access
        self._metrics = metrics
        self._tracing = tracing
        self._logged_at: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(FUNCTIONS):
            scope["headers"] = with_bearer(scope["headers"])
        refusal: ApiError | None = None
        try:
            request_id, digest = self._request_id(scope)
        except ApiError as error:
            request_id, digest, refusal = os.urandom(16).hex(), None, error
            if isinstance(error, HopRefused):
                self._log(error, scope)
        normalize_path(scope)  # the signature was made of the path as it was sent
        is_genuine = digest is not None
        scope["pilotlight.request_id"] = request_id
        REQUEST.set(request_id)
        scope[GENUINE_HOP] = is_genuine
        scope[SITE_NAME] = self._site
        if is_genuine:
            scope[ACCOUNT] = header(scope, headers.ACCOUNT) or ""
        ours = [(headers.REQUEST_ID.encode(), request_id.encode()), (headers.SITE.encode(), self._site.encode())]
        if self._require_hop and not is_genuine and scope["path"] == "/status":
            # A router that signs nothing learns from its probes what to expect.
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
        """Return the router's id and the digest of the body that it signed, or a new id and None.

        Raises ApiError if the signature is invalid or required and missing."""
        signature = header(scope, headers.HOP)
        given = header(scope, headers.REQUEST_ID) or ""
        if self._hop_secret is not None and signature is not None:
            query = scope["query_string"].decode("latin-1")
            method = scope.get("method", "GET")  # a WebSocket's
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
        """Judge a request that no router has signed. Raises ApiError."""
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
    """Refuse a body that differs from the signed one, when all of it has arrived.

    A route that streams the body has already read its start."""
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
    """Return a path's label, one of a bounded set."""
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


UNROUTED: dict[int, ExceptionHandler] = {404: _no_path, 405: _no_method}  # of an application inside this middleware
