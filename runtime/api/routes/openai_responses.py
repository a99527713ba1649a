"""OpenAI's Responses: /v1/responses and the paths of stored responses below it.

A router stores responses itself, so requests from routers are answered but not stored."""

from functools import partial

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.openai_responses import ResponsesWriter, parse_response
from pilotlight.response_store.app import INPUT_TOKENS, OpenDoor, ResponsesApp
from pilotlight.response_store.response_database import RetentionPolicy
from pilotlight.response_store.sockets import ResponseSockets
from pilotlight.runtime.api.builders.blocks import BlockBuilder
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.routes.endpoint import PREFIXES, Endpoint
from pilotlight.runtime.api.routes.token_count import TokenCount
from pilotlight.runtime.generation.generator import Generator
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import Dialect


class ResponsesEndpoint:
    """A pure ASGI application for /v1/responses and the paths below it.
    Run `keeping.run()` as a task while it serves, and call `keeping.close()` afterwards."""

    def __init__(self, generator: Generator, config: SiteConfig, access: Access) -> None:
        limits, kept = config.limits, config.responses
        build = partial(BlockBuilder, ResponsesWriter)
        self._endpoint = Endpoint(generator, Dialect.OPENAI_RESPONSES, parse_response, build, limits)
        self._count = TokenCount(generator, parse_response, limits, object="response.input_tokens")
        kept.make_directory()
        keeping = RetentionPolicy(kept.file_of(config.name), int(kept.max_gib * 2**30), kept.keep_days * 86_400)
        self.keeping = ResponsesApp(self._answer, OpenDoor(access), limits.max_body_bytes, keeping)
        self.sockets = ResponseSockets(self.keeping)

    def routes(self) -> list[BaseRoute]:
        methods = ["GET", "POST", "DELETE"]
        sockets = [WebSocketRoute(f"{prefix}/responses", self.sockets) for prefix in PREFIXES]
        return sockets + [
            Route(f"{prefix}/{name}{rest}", self, methods=methods)
            for prefix in PREFIXES
            for name in ("responses", "conversations")
            for rest in ("", "/{rest:path}")
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._answer if scope.get(GENUINE_HOP, False) else self.keeping
        await app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that includes its whole conversation."""
        app = self._count if scope["path"].endswith(f"/{INPUT_TOKENS}") else self._endpoint
        await app(scope, receive, send)
