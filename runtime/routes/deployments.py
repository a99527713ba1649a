"""What a router asks a site about deployed functions: try a version before it has traffic, serve it once it has, and follow what a function prints.

All must be signed where the network has a secret; what is printed may be private, so without one it needs the deploy token.
"""

import os
import time
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from runtime.connection import header, read_body, response_start, send_json, until_disconnect
from runtime.functions.deployed import DeployedFunctions
from runtime.functions.serving import ServedFunctions
from runtime.functions.tails import Tails
from runtime.middleware.identity import GENUINE_HOP
from runtime.routing import Route, get, post
from wire.deployments import SERVE_PATH, TAIL_PATH, TRY_PATH, Serve, Try, encode
from wire.errors import ApiError
from wire.headers import DEPLOY_TOKEN_ENV, HOP, REQUEST_ID, Hop, hop_is_genuine
from wire.sse import CONTENT_TYPE, encode_event

MAX_BODY = 64 << 10
WantedT = TypeVar("WantedT", Try, Serve)


class DeploymentRoutes:
    def __init__(self, served: ServedFunctions, hop_secret: str | None, site: str) -> None:
        self._served = served
        self._site = site
        self._hop_secret = hop_secret
        self._token = os.environ.get(DEPLOY_TOKEN_ENV, "")

    def routes(self) -> list[Route]:
        return [
            post(TRY_PATH, self.try_version),
            post(SERVE_PATH, self.serve),
            get(TAIL_PATH + "/{name}", self.tail),
        ]

    async def try_version(self, scope: Scope, receive: Receive, send: Send) -> None:
        deployed, wanted = await self._wanted(scope, receive, Try)
        await send_json(send, encode(await deployed.tried(wanted.name, wanted.version)))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        deployed, wanted = await self._wanted(scope, receive, Serve)
        await send_json(send, encode(await deployed.served(wanted.name, wanted.revision)))

    async def _wanted(self, scope: Scope, receive: Receive, kind: type[WantedT]) -> tuple[DeployedFunctions, WantedT]:
        """Raises ApiError where it is no router's to ask, or makes no sense here."""
        if (self._hop_secret or self._token) and not self._is_from_router(scope):
            raise ApiError("forbidden", "a version is tried and served for one of the network's routers only")
        if self._served.deployed is None:
            raise ApiError("not_found", "this site serves no deployed functions: its file has no functions.deployments")
        raw = await read_body(scope, receive, MAX_BODY)
        try:
            return self._served.deployed, msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ApiError("malformed_json", f"the body is not what a router asks for: {error}") from None

    async def tail(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_from_router(scope):
            raise ApiError("forbidden", "a function is followed through one of the network's routers only")
        name, tails = scope["path_params"]["name"], self._served.functions.tails
        if tails.is_full(name):
            raise ApiError("overloaded", "too many follow this function already", retry_after_s=5)
        await until_disconnect(receive, _follow(tails, name, self._site, send))

    def _is_from_router(self, scope: Scope) -> bool:
        """Where the network has no secret, its routers sign with the deploy token."""
        if self._hop_secret is not None or not self._token:
            return bool(scope.get(GENUINE_HOP, False))
        id, signature = header(scope, REQUEST_ID.encode()) or "", header(scope, HOP.encode()) or ""
        return hop_is_genuine(signature, self._token, time.time(), Hop(scope["method"], scope["path"], id, self._site))


def deployment_routes(served: ServedFunctions, hop_secret: str | None, site: str) -> list[Route]:
    return DeploymentRoutes(served, hop_secret, site).routes()


async def _follow(tails: Tails, name: str, site: str, send: Send) -> None:

    async def write(event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})

    await send(response_start(200, [("content-type", CONTENT_TYPE), ("cache-control", "no-store")]))
    await write(b": following\n\n")
    async with aclosing(tails.follow(name)) as lines:
        async for line in lines:
            event = {"site": site, "at_s": round(line.at_s, 3), "line": line.text}
            await write(encode_event(msgspec.json.encode(event)))
    await send({"type": "http.response.body", "body": b""})
