"""Who is asking and who answers: the hop signature, the request id, and the site's name on every response.

A request id from outside is kept only with a genuine signature of one of the network's routers; anybody else could confuse our logs with it. The
scope says behind it whether the hop is genuine.
"""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.connection import answering, header, send_error
from runtime.metrics import Metrics
from runtime.middleware.errors import BEGINNINGS
from wire import headers
from wire.chance import random_bytes
from wire.errors import ApiError, dialect_of

GENUINE_HOP = "pilotlight.genuine_hop"  # in the scope: a router of the network has signed this request
SITE_NAME = "pilotlight.site"  # in the scope
OWN_PATHS = ("/livez", "/readyz", "/metrics", "/status", "/timeline")


class Identity:
    def __init__(self, app: ASGIApp, *, site: str, hop_secret: str | None, require_hop: bool, metrics: Metrics) -> None:
        self._app = app
        self._site = site
        self._hop_secret = hop_secret
        self._require_hop = require_hop
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: ApiError | None = None
        try:
            request_id, is_genuine = self._request_id(scope)
        except ApiError as error:
            request_id, is_genuine, refusal = random_bytes(16).hex(), False, error
        scope["pilotlight.request_id"] = request_id
        scope[GENUINE_HOP] = is_genuine
        scope[SITE_NAME] = self._site
        ours = [(headers.REQUEST_ID.encode(), request_id.encode()), (headers.SITE.encode(), self._site.encode())]

        async def signing(message: Message) -> None:
            if message["type"] in BEGINNINGS:
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
                self._metrics.response(_family(scope["path"]), message.get("status", 101))
            await send(message)

        if refusal is not None:
            await send_error(answering(scope, signing), refusal, dialect_of(scope["path"]))
        else:
            await self._app(scope, receive, signing)

    def _request_id(self, scope: Scope) -> tuple[str, bool]:
        """The router's id where its signature is genuine, else a new one, and which it is. Raises ApiError where the hop must not pass."""
        signature = header(scope, headers.HOP.encode())
        given = header(scope, headers.REQUEST_ID.encode()) or ""
        if self._hop_secret is not None and signature is not None:
            path = scope["path"]  # decoded: a proxy in between may spell the same path otherwise
            method = scope.get("method", "GET")  # a WebSocket's
            if headers.hop_is_genuine(signature, self._hop_secret, time.time(), method, path, given):
                return given or random_bytes(16).hex(), True
            raise ApiError("forbidden", f"the {headers.HOP} signature is not genuine, or older than a minute")
        if self._require_hop and scope["path"] not in OWN_PATHS:
            raise ApiError(
                "forbidden", "this site answers only requests that come through one of the network's routers"
            )
        return random_bytes(16).hex(), False


def _family(path: str) -> str:
    """A bounded set of labels, whatever paths are asked for."""
    for family in ("chat/completions", "completions", "embeddings", "models"):
        if path in (f"/ai/v1/{family}", f"/v1/{family}"):
            return family
    if "/ai/run/" in path:
        return "run"
    return path.removeprefix("/") if path in OWN_PATHS else "other"
