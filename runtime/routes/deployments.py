"""What a router asks a site about deployed functions: try a version before it has traffic, and follow what a function prints.

Both must be signed where the network has a secret; what is printed may be private, so without one it needs the deploy token.
"""

import hmac
import os
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from runtime.connection import read_body
from runtime.functions.serving import ServedFunctions
from runtime.functions.tails import Tails
from runtime.middleware.identity import GENUINE_HOP
from wire.deployments import DEPLOY_TOKEN_ENV, TAIL_PATH, TRY_PATH, Try, encode
from wire.errors import ApiError

MAX_BODY = 64 << 10


class DeploymentRoutes:
    def __init__(self, served: ServedFunctions, hop_secret: str | None, site: str) -> None:
        self._served = served
        self._site = site
        self._hop_secret = hop_secret
        self._token = os.environ.get(DEPLOY_TOKEN_ENV, "")

    def routes(self) -> list[BaseRoute]:
        return [Route(TRY_PATH, self.try_version, methods=["POST"]), Route(TAIL_PATH + "/{name}", self.tail)]

    async def try_version(self, request: Request) -> Response:
        if self._hop_secret is not None and not request.scope.get(GENUINE_HOP, False):
            raise ApiError("forbidden", "a version is tried for one of the network's routers only")
        if self._served.deployed is None:
            raise ApiError("not_found", "this site serves no deployed functions: its file has no functions.deployments")
        raw = await read_body(request.scope, request.receive, MAX_BODY)
        try:
            wanted = msgspec.json.decode(raw, type=Try)
        except msgspec.DecodeError as error:
            raise ApiError("malformed_json", f"the body is no version to try: {error}") from None
        tried = await self._served.deployed.tried(wanted.name, wanted.version)
        return Response(encode(tried), media_type="application/json")

    async def tail(self, request: Request) -> Response:
        if not request.scope.get(GENUINE_HOP, False) and not self._has_token(request):
            raise ApiError("forbidden", f"following a function needs a router's signature, or {DEPLOY_TOKEN_ENV}")
        name, tails = request.path_params["name"], self._served.functions.tails
        if tails.is_full(name):
            raise ApiError("overloaded", "too many follow this function already", retry_after_s=5)
        events = _events(tails, name, self._site)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    def _has_token(self, request: Request) -> bool:
        _, _, given = request.headers.get("authorization", "").partition(" ")
        return bool(self._token) and hmac.compare_digest(given.strip().encode(), self._token.encode())


def deployment_routes(served: ServedFunctions, hop_secret: str | None, site: str) -> list[BaseRoute]:
    return DeploymentRoutes(served, hop_secret, site).routes()


async def _events(tails: Tails, name: str, site: str) -> AsyncIterator[bytes]:
    yield b": following\n\n"
    async for line in tails.follow(name):
        event = {"site": site, "at_s": round(line.at_s, 3), "line": line.text}
        yield b"data: " + msgspec.json.encode(event) + b"\n\n"
