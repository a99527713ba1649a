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
from pilotlight.runtime.api.router_context import require_router
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
        hint = await read_json(request, WakeHint, MAX_BODY, 'the body must be {"model": NAME}')
        name = self._models.registry.named(hint.model)
        self._models.hint(name)
        answer = WakeAnswer(name, self._models.registry.residency(name))
        return json_response(msgspec.json.encode(answer), 202)

    async def catalogue(self, request: Request) -> Response:
        require_router(request.scope, "manage its models")
        return json_response(msgspec.json.encode(await self._operator.catalogue()))

    async def operation(self, request: Request) -> Response:
        """Run an operation. Unlike a hint it can remove data, so it always needs a signature."""
        require_router(request.scope, "manage its models")
        await self._operator.perform(await read_json(request, SiteOperation, MAX_BODY, "the body must be an operation"))
        return json_response(b"{}", 202)

    async def search_hub(self, request: Request) -> Response:
        require_router(request.scope, "manage its models")
        query = await read_json(request, HubQuery, MAX_BODY, 'the body must be {"words": TEXT}')
        return json_response(msgspec.json.encode(await self._operator.search_hub(query)))

    async def requests(self, request: Request) -> Response:
        require_router(request.scope, "manage its models")
        return json_response(msgspec.json.encode(list(self._recent.times)))

    async def timeline(self, request: Request) -> Response:
        return json_response(msgspec.json.encode({"spans": self._timeline.spans}))
