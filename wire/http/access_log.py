"""One log line for each ended request, if `access_log = true` under [telemetry]."""

import logging
import time
from typing import Any
from urllib.parse import quote

from pilotlight.support.logs import REQUEST

PROBES = ("/livez", "/readyz", "/health", "/ping", "/status", "/metrics")
# Requests between sites and routers, one every second or two (wire/hop/). They would be most of the lines in a quiet network's log.
POLLS = (("GET", "/deployments"), ("POST", "/internal/usage"))
_SITE = b"x-pilotlight-site"  # as in wire/hop/headers.py

log = logging.getLogger("pilotlight.access")


class AccessLog:
    """The outermost ASGI middleware, so that refusals are logged, too."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or _is_routine(scope):
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        began, status, num_bytes, site = time.perf_counter(), 0, 0, ""
        path, method = quote(scope["path"], safe="/:@!$&'()*+,;=~"), scope.get("method", "WEBSOCKET")

        async def counted(message: Any) -> None:
            nonlocal status, num_bytes, site
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                status = message.get("status", 101)
                site = dict(message.get("headers", ())).get(_SITE, b"").decode("latin-1")
            elif kind == "websocket.send":
                num_bytes += len(message.get("bytes") or (message.get("text") or "").encode())
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            fields = {
                "client": (scope.get("client") or ("-",))[0],
                "method": method,
                "path": path,
                "status": status,  # 0 if the connection ended before a response started
                "bytes": num_bytes,
                "duration_ms": round(1000 * (time.perf_counter() - began), 1),
                "site": site,
                "request_id": REQUEST.get(),
            }
            line = "%(client)s %(method)s %(path)s %(status)d %(bytes)d B %(duration_ms)s ms"
            log.info(line + (" by %(site)s" if site else ""), fields, extra={"fields": fields})


def _is_routine(scope: Any) -> bool:
    return scope["path"] in PROBES or (scope.get("method"), scope["path"]) in POLLS
