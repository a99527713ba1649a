"""A router's requests about deployed functions: their versions, their output, their invocations.

Requests are signed if the network has a secret. Output may be private, so in a network without a secret requests for it are signed with the deploy
token.
"""

import os
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pilotlight.functions.deployed import DeployedFunctions
from pilotlight.functions.host.tails import Tails
from pilotlight.functions.served import ServedFunctions
from pilotlight.runtime.api.connection import json_response, read_json
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.support.database import DatabaseError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import SERVE_PATH, TAIL_PATH, TRY_PATH, Serve, Try, encode
from pilotlight.wire.hop.function_logs import LOGS_PATH, LoggedInvocation, LogQuery
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP, REQUEST_ID, Hop, hop_is_genuine
from pilotlight.wire.http.asgi import header, response_start, until_disconnect
from pilotlight.wire.sse import CONTENT_TYPE, encode_event

MAX_BODY = 64 << 10
WantedT = TypeVar("WantedT", Try, Serve)


class FunctionDeploymentRoutes:
    def __init__(self, served: ServedFunctions, hop_secret: str | None, site: str) -> None:
        self._served = served
        self._site = site
        self._hop_secret = hop_secret
        self._token = os.environ.get(DEPLOY_TOKEN_ENV, "")

    def routes(self) -> list[Route]:
        return [
            Route(TRY_PATH, self.try_version, methods=["POST"]),
            Route(SERVE_PATH, self.serve, methods=["POST"]),
            Route(TAIL_PATH + "/{name}", self.tail),
            Route(LOGS_PATH, self.logs, methods=["POST"]),
        ]

    async def try_version(self, request: Request) -> Response:
        deployed, wanted = await self._wanted(request, Try)
        return json_response(encode(await deployed.tried(wanted)))

    async def serve(self, request: Request) -> Response:
        deployed, wanted = await self._wanted(request, Serve)
        return json_response(encode(await deployed.served(wanted.name, wanted.revision)))

    async def _wanted(self, request: Request, kind: type[WantedT]) -> tuple[DeployedFunctions, WantedT]:
        """Check and decode a router's request.
        Raises ApiError if the network has a secret or a deploy token and no router signed the request, the site serves no deployed functions, or the
        body is invalid."""
        if (self._hop_secret or self._token) and not self._is_from_router(request.scope):
            raise ApiError("forbidden", "only the network's routers may try and serve versions")
        if self._served.deployed is None:
            raise ApiError("not_found", "this site serves no deployed functions: its file has no functions.deployments")
        return self._served.deployed, await read_json(
            request, kind, MAX_BODY, "the body is not a valid request of a router"
        )

    async def tail(self, request: Request) -> Response:
        if not self._is_from_router(request.scope):
            raise ApiError("forbidden", "a function can be followed only through the network's routers")
        name, tails = request.path_params["name"], self._served.functions.tails
        if tails.is_full(name):
            raise ApiError("overloaded", "too many clients follow this function already", retry_after_s=5)
        return _Tail(tails, name, self._site)

    async def logs(self, request: Request) -> Response:
        if not self._is_from_router(request.scope):
            raise ApiError("forbidden", "a function's log can be read only through the network's routers")
        query = await read_json(request, LogQuery, MAX_BODY, "the body is not a valid request of a router")
        return json_response(encode(await kept_invocations(self._served, query, self._site)))

    def _is_from_router(self, scope: Scope) -> bool:
        """Tell whether a router signed the request.
        The key is the network's secret or, without one, the deploy token."""
        if self._hop_secret is not None or not self._token:
            return bool(scope.get(GENUINE_HOP, False))
        id, signature = header(scope, REQUEST_ID) or "", header(scope, HOP) or ""
        return hop_is_genuine(signature, self._token, time.time(), Hop(scope["method"], scope["path"], id, self._site))


async def kept_invocations(served: ServedFunctions, query: LogQuery, site: str) -> list[LoggedInvocation]:
    """Return the stored invocations of a function. Raises ApiError."""
    try:
        found = await served.functions.invocations.find(query)
    except (sqlite3.Error, DatabaseError) as error:
        raise ApiError("overloaded", f"the log cannot be read: {error}", retry_after_s=5) from None
    return [replace(invocation, site=site) for invocation in found]


class _Tail(Response):
    """Streams a function's output until the client disconnects."""

    def __init__(self, tails: Tails, name: str, site: str) -> None:
        super().__init__()
        self._tails, self._name, self._site = tails, name, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._follow(send))

    async def _follow(self, send: Send) -> None:
        await send(response_start(200, [("content-type", CONTENT_TYPE), ("cache-control", "no-store")]))
        async with aclosing(events_of(self._tails, self._name, self._site)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def events_of(tails: Tails, name: str, site: str) -> AsyncGenerator[bytes, None]:
    """Yield a function's output at this site as server-sent events: {"site", "at_s", "line"}."""
    yield b": following\n\n"
    async with aclosing(tails.follow(name)) as lines:
        async for line in lines:
            event = {"site": site, "at_s": round(line.at_s, 3), "line": line.text}
            yield encode_event(msgspec.json.encode(event))
