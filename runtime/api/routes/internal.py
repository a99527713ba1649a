"""Routes for the network's own parts.

POST /internal/wake (a hint: a request for this model will follow), GET /internal/catalogue, POST /internal/operation and POST /internal/hub (for
operators), GET /timeline (duration of each step). If the network has a secret, hints must be signed too, because they change the site's state. A hint
is never refused for lack of capacity; the response reports where the model's weights are.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.runtime.api.connection import json_response, read_json
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.management.operator import SiteOperator
from pilotlight.runtime.models.registry import Models
from pilotlight.runtime.telemetry.recent_generations import RecentGenerations
from pilotlight.runtime.telemetry.timeline import Timeline
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import (
    CATALOGUE_PATH,
    HUB_PATH,
    OPERATION_PATH,
    REQUESTS_PATH,
    WAKE_PATH,
    HubQuery,
    SiteOperation,
    WakeAnswer,
    WakeHint,
)

MAX_BODY = 4096


class Internal:
    def __init__(
        self,
        models: Models,
        operator: SiteOperator,
        recent: RecentGenerations,
        timeline: Timeline,
        hop_secret: str | None,
    ) -> None:
        self._recent = recent
        self._models = models
        self._operator = operator
        self._timeline = timeline
        self._needs_signature = hop_secret is not None

    def routes(self) -> list[Route]:
        return [
            Route(WAKE_PATH, self.wake, methods=["POST"]),
            Route(CATALOGUE_PATH, self.catalogue),
            Route(OPERATION_PATH, self.operation, methods=["POST"]),
            Route(HUB_PATH, self.search_hub, methods=["POST"]),
            Route(REQUESTS_PATH, self.requests),
            Route("/timeline", self.timeline),
        ]

    async def wake(self, request: Request) -> Response:
        if self._needs_signature and not request.scope.get(GENUINE_HOP, False):
            raise ApiError("forbidden", "the hint must be signed by one of the network's routers")
        name = await self._model(request)
        self._models.hint(name)
        return self._told(name)

    async def catalogue(self, request: Request) -> Response:
        _require_router(request)
        return json_response(msgspec.json.encode(await self._operator.catalogue()))

    async def operation(self, request: Request) -> Response:
        """Run an operation. Unlike a hint it can remove data, so it always needs a signature."""
        _require_router(request)
        await self._operator.perform(await read_json(request, SiteOperation, MAX_BODY, "the body must be an operation"))
        return json_response(b"{}", 202)

    async def search_hub(self, request: Request) -> Response:
        _require_router(request)
        query = await read_json(request, HubQuery, MAX_BODY, 'the body must be {"words": TEXT}')
        return json_response(msgspec.json.encode(await self._operator.search_hub(query)))

    async def requests(self, request: Request) -> Response:
        _require_router(request)
        return json_response(msgspec.json.encode(list(self._recent.times)))

    async def _model(self, request: Request) -> str:
        """Return the main name of the model that the body names. Raises ApiError."""
        hint = await read_json(request, WakeHint, MAX_BODY, 'the body must be {"model": NAME}')
        name = self._models.registry.resolve(hint.model)
        if name is None:
            raise ApiError("model_not_found", f"this site has no model named {hint.model[:200]!r}", param="model")
        return name

    def _told(self, name: str) -> Response:
        answer = WakeAnswer(name, self._models.registry.residency(name))
        return json_response(msgspec.json.encode(answer), 202)

    async def timeline(self, request: Request) -> Response:
        return json_response(msgspec.json.encode({"spans": self._timeline.spans}))


def _require_router(request: Request) -> None:
    if not request.scope.get(GENUINE_HOP, False):
        raise ApiError("forbidden", "only a router that shares a secret with this site may manage its models")
