"""What operators and routers ask a site: /livez, /readyz, /metrics, /status.

Ready means that a request sent now would start to be answered: an engine host lives, and every model that belongs on the device is there.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.admission import Admission
from runtime.engines.fleet import Fleet
from runtime.engines.models import Models
from runtime.metrics import Metrics
from runtime.series import CONTENT_TYPE
from runtime.traffic import Traffic
from sites.site import SiteConfig
from wire.status import Place, ProcessStatus, SiteStatus, encode_status

if TYPE_CHECKING:
    from runtime.functions.serving import ServedFunctions


class Health:
    def __init__(
        self,
        site: SiteConfig,
        fleet: Fleet,
        models: Models,
        admission: Admission,
        metrics: Metrics,
        traffic: Traffic,
        version: Callable[[], str],
        url: Callable[[], str | None],
        functions: "ServedFunctions | None" = None,
    ) -> None:
        self._site = site
        self._fleet = fleet
        self._models = models
        self._admission = admission
        self._metrics = metrics
        self._traffic = traffic
        self._version = version
        self._url = url
        self._functions = functions
        self._sequence = 0

    def routes(self) -> list[BaseRoute]:
        paths = {"/livez": self.livez, "/readyz": self.readyz, "/metrics": self.metrics, "/status": self.status}
        return [Route(path, endpoint) for path, endpoint in paths.items()]

    def why_not_ready(self) -> list[str]:
        reasons = ["the site is draining"] if self._admission.draining else []
        if (why := self._fleet.why_down) is not None:
            return [*reasons, why]
        return reasons + self._models.missing()

    async def livez(self, request: Request) -> Response:
        """The process answers: nothing else is claimed."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        reasons = self.why_not_ready()
        if not reasons:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reasons": reasons}, 503, {"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        return Response(encode_status(self.site_status()), media_type="application/json")

    def site_status(self) -> SiteStatus:
        self._sequence += 1
        place = self._site.place
        processes = [ProcessStatus("site", os.getpid(), self._site.name, self._url())]
        for host in self._fleet.hosts:
            if (pid := host.pid) is not None:
                processes.append(ProcessStatus("engine", pid, self._site.name, host.url, host.device))
            if (pid := host.standby.pid) is not None:
                processes.append(ProcessStatus("standby", pid, self._site.name, host.standby.url, host.device))
        return SiteStatus(
            site=self._site.name,
            version=self._version(),
            place=Place(place.city, place.latitude, place.longitude),
            sequence=self._sequence,
            ready=not self.why_not_ready(),
            draining=self._admission.draining,
            inflight=self._admission.inflight,
            max_inflight=self._admission.max_inflight,
            models=tuple(self._traffic.published(status) for status in self._models.statuses()),
            processes=tuple(processes),
            functions=None if self._functions is None else self._functions.status(),
        )
