"""Routes of the router itself: liveness, readiness, metrics, status, and how it would choose a site."""

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from pilotlight.dialects import ollama
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.metering.objectives import Objectives, slo_answer
from pilotlight.edge_router.requests.client_places import ClientPlaces
from pilotlight.edge_router.requests.request import Head, RequestParser, aside_if_large, request_id_of
from pilotlight.page.sessions import Sessions
from pilotlight.support.disk_errors import is_disk_full, is_unwritable
from pilotlight.support.version import own_version
from pilotlight.wire.errors import ApiError, dialect_of
from pilotlight.wire.hop.status import Place, ProcessStatus, RouterStatus, encode_status
from pilotlight.wire.http.asgi import read_body
from pilotlight.wire.paths import nothing_at

log = logging.getLogger(__name__)

JSON = "application/json"
MAX_DEBUG_BODY = 8 << 20
# Paths that each process of a router answers itself.
OWN_PATHS = frozenset({
    "/livez", "/readyz", "/health", "/ping", "/version", "/openapi.json", "/docs", "/metrics", "/status", "/debug/route",
})  # fmt: skip

Endpoint = Callable[[Request], Awaitable[Response]]


class OwnRoutes:
    def __init__(
        self,
        place: Place,
        proxy: Proxy,
        places: ClientPlaces,
        sessions: Sessions,
        metrics: Callable[[], Awaitable[bytes]],
        objectives: Objectives | None,
    ) -> None:
        """`metrics` returns the text of /metrics."""
        self._objectives = objectives
        self._metrics = metrics
        self._place = place
        self._proxy = proxy
        self._places = places
        self._sessions = sessions
        self._backends = proxy.selector.backends

    def routes(self) -> list[Route]:
        return [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/health", self.readyz),
            Route("/ping", self.livez),
            Route("/version", self.version),
            *ollama.fixed_routes(),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/metrics", self._for("metrics", self.metrics)),
            Route("/status", self._for("metrics", self.status)),
            Route("/slo", self._for("metrics", self.slo)),
            Route("/debug/route", self._for("admin", self.debug_route), methods=["GET", "POST"]),
        ]

    def _for(self, scope: str, endpoint: Endpoint) -> Endpoint:
        """Restrict an endpoint to keys with a scope, if keys are required."""

        async def checked(request: Request) -> Response:
            self._sessions.visitor(request, scope)
            return await endpoint(request)

        return checked

    async def livez(self, request: Request) -> Response:
        return _json({"live": True})

    async def readyz(self, request: Request) -> Response:
        """Return 200 if at least one site is healthy and the router does not drain, else 503.
        The body names all unhealthy sites."""
        healthy = [backend.name for backend in self._backends.values() if backend.state == "healthy"]
        others = {
            backend.name: f"{backend.state}: {backend.detail}"
            for backend in self._backends.values()
            if backend.state != "healthy"
        }
        ready = bool(healthy) and not self._proxy.admission.is_draining
        fields = {
            "ready": ready,
            "draining": self._proxy.admission.is_draining,
            "healthy": healthy,
            "not_healthy": others,
        }
        return _json(fields, 200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": own_version()})

    async def openapi(self, request: Request) -> Response:
        from pilotlight.dialects.openapi import document  # imported here: with every dialect's types

        return Response(document(own_version()), media_type=JSON)

    async def docs(self, request: Request) -> Response:
        from pilotlight.dialects.openapi import page

        return HTMLResponse(page(own_version()))

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def status(self, request: Request) -> Response:
        process = ProcessStatus("router", os.getpid(), url=str(request.base_url).rstrip("/"))
        views = tuple(backend.published_view() for backend in self._backends.values())
        return Response(encode_status(RouterStatus(own_version(), self._place, process, views)), media_type=JSON)

    async def slo(self, request: Request) -> Response:
        """Return the state of each objective."""
        if self._objectives is None:
            sentence = "this router has no objectives: add [[objectives]] to its file"
            raise ApiError("not_found", sentence)
        return _json(slo_answer(await self._objectives.states()))

    async def debug_route(self, request: Request) -> Response:
        """Return the ranking of sites for a request without sending it.

        POST the body and headers of the request, or GET with `?model=`; `?address=` is the client's address.
        """
        path = request.query_params.get("path", "/ai/v1/chat/completions")
        model = request.query_params.get("model")
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        head = Head("POST", path, path, headers)
        try:
            body = await read_body(request.scope, request.receive, MAX_DEBUG_BODY)
            if not body and model:
                body = orjson.dumps({"model": model})
            address = request.query_params.get("address", "")
            parser = RequestParser(self._proxy.parser.secret, self._proxy.config.max_hops, self._supposed_place)
            asked = await aside_if_large(body, parser.parse, head, body, request_id_of(head), address)
        except ApiError as error:
            return refusal(error, request)
        route, preferences = self._proxy.selector.rank(asked)
        ranked = {preference.backend.name for preference in preferences}
        return _json({
            "model": asked.model,
            "prompt_tokens": route.prompt_tokens,
            "home": None if route.home is None else {
                "site": route.home.site, "cached_tokens": route.home.cached_tokens, "by_name": route.home.by_name,
            },
            "ranking": [
                {
                    "site": preference.backend.name, "state": preference.backend.state, "reason": preference.reason,
                    "cost_ms": round(preference.cost_ms, 3),
                    "patience_ms": None if preference.max_queue_ms is None else round(preference.max_queue_ms, 3),
                    "cached_tokens": preference.backend.cached_tokens(route),
                    "status_age_s": _age_s(route.now_s, preference.backend.status_at_s),
                    "terms": {name: round(value, 3) for name, value in preference.terms.items()},
                }
                for preference in preferences
            ],
            "left_out": {
                backend.name: backend.detail or "does not serve the model"
                for backend in self._backends.values() if backend.name not in ranked
            },
        })  # fmt: skip

    def _supposed_place(self, address: str, header: str, is_hop: bool) -> Place | None:
        """Return the location of the client of a hypothetical request. Its location header is always trusted."""
        return self._places.place(address, header, is_hop or bool(header))


def refusal(error: ApiError, request: Request) -> Response:
    dialect = dialect_of(request.url.path, request.headers.raw)
    return Response(orjson.dumps(error.body(dialect)), error.status(dialect), dict(error.headers()), JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error, request)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client is gone


async def _not_found(request: Request, error: Exception) -> Response:
    """Return a 404 for paths that are neither forwarded nor the router's own."""
    return refusal(ApiError("not_found", nothing_at(request.url.path)), request)


async def _method_not_allowed(request: Request, error: Exception) -> Response:
    path = request.url.path
    return refusal(ApiError("method_not_allowed", f"{path[:200]} does not take {request.method}"), request)


async def _not_written(request: Request, error: Exception) -> Response:
    """Return a 503 if the router's disk is full or cannot be written; raise any other error."""
    if not is_unwritable(error):
        raise error
    assert isinstance(error, OSError)
    log.error("%s %s: a file cannot be written: %s", request.method, request.url.path, error)
    why = "disk is full" if is_disk_full(error) else f"files cannot be written ({error.strerror})"
    return refusal(ApiError("overloaded", f"this router's {why}: nothing was changed", retry_after_s=60), request)


# Handlers of the exceptions and HTTP errors of routes.
FAILURES: dict[Any, ExceptionHandler] = {
    ApiError: _refused,
    OSError: _not_written,
    ClientDisconnect: _left,
    404: _not_found,
    405: _method_not_allowed,
}


def _age_s(now_s: float, at_s: float) -> float | None:
    return round(max(0.0, now_s - at_s), 3) if at_s > float("-inf") else None


def _json(fields: object, status: int = 200) -> Response:
    return Response(orjson.dumps(fields), status, media_type=JSON)
