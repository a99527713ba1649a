"""Routes for operators and routers: /livez, /readyz, /metrics, /status, and aliases of these paths."""

import time
from typing import TYPE_CHECKING

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.site import Site
from pilotlight.runtime.telemetry.digest_editions import DigestEditions
from pilotlight.support.version import own_version
from pilotlight.wire.hop.status import Place, SiteStatus, encode_status

if TYPE_CHECKING:
    from pilotlight.functions.service import FunctionsService


class Health:
    def __init__(self, site: Site, functions: "FunctionsService | None") -> None:
        self._site = site
        self._functions = functions
        self._editions = DigestEditions()
        self._sequence = 0
        self._started_s = time.monotonic()

    def routes(self) -> list[Route]:
        paths = {
            "/livez": self.livez, "/readyz": self.readyz, "/health": self.readyz, "/ping": self.livez,
            "/version": self.version, "/openapi.json": self.openapi, "/docs": self.docs, "/metrics": self.metrics, "/status": self.status,
        }  # fmt: skip
        return [Route(path, endpoint) for path, endpoint in paths.items()]

    async def livez(self, request: Request) -> Response:
        """Report that the process responds; it need not be ready."""
        return json_response(b'{"status":"alive"}')

    async def readyz(self, request: Request) -> Response:
        if reasons := self._site.why_not_ready():
            body = orjson.dumps({"status": "not ready", "reasons": reasons})
            return json_response(body, 503, {"retry-after": "1"})
        return json_response(b'{"status":"ready"}')

    async def version(self, request: Request) -> Response:
        return json_response(orjson.dumps({"version": own_version()}))

    async def openapi(self, request: Request) -> Response:
        from pilotlight.dialects.openapi import document  # imported here: few read it

        return json_response(document(own_version()))

    async def docs(self, request: Request) -> Response:
        from pilotlight.dialects.openapi import page

        return HTMLResponse(page(own_version()))

    async def metrics(self, request: Request) -> Response:
        return Response(self._site.metrics.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def status(self, request: Request) -> Response:
        """Return the site's status.

        With `?digests=EDITION` it includes the changes of the prefix digests since that edition, if the site still knows them.
        """
        known = request.query_params.get("digests", "")
        status = self._editions.publish(self.site_status(), int(known) if known.isdecimal() and len(known) < 20 else 0)
        return json_response(encode_status(status))

    def site_status(self) -> SiteStatus:
        self._sequence += 1
        site, config, admission = self._site, self._site.config, self._site.admission
        published = site.generator.traffic.published
        return SiteStatus(
            site=config.name,
            version=own_version(),
            place=Place(config.place.city, config.place.latitude, config.place.longitude),
            sequence=self._sequence,
            ready=not site.why_not_ready(),
            draining=admission.draining,
            inflight=admission.inflight,
            max_inflight=admission.max_inflight,
            models=tuple(published(status) for status in site.models.registry.statuses()),
            processes=tuple(site.processes()),
            functions=None if self._functions is None else self._functions.status(),
            uptime_s=round(time.monotonic() - self._started_s, 1),
            finetunes=None if site.finetunes is None else site.finetunes.state,
            fallbacks=site.fleet.fallbacks,
        )
