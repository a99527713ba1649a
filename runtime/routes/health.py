"""What operators and routers ask a site: /livez, /readyz, /metrics, /status.

Ready means that a request sent now would start to be answered: an engine host lives, and every model that belongs on the device is there.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson
from starlette.types import Receive, Scope, Send

from runtime.admission import Admission
from runtime.connection import send_bytes, send_json
from runtime.engines.fleet import Fleet
from runtime.engines.models import Models
from runtime.metrics import Metrics
from runtime.routing import Route, get
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

    def routes(self) -> list[Route]:
        paths = {"/livez": self.livez, "/readyz": self.readyz, "/metrics": self.metrics, "/status": self.status}
        return [get(path, endpoint) for path, endpoint in paths.items()]

    def why_not_ready(self) -> list[str]:
        reasons = ["the site is draining"] if self._admission.draining else []
        if (why := self._fleet.why_down) is not None:
            return [*reasons, why]
        return reasons + self._models.missing()

    async def livez(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The process answers: nothing else is claimed."""
        await send_json(send, b'{"status":"alive"}')

    async def readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        if reasons := self.why_not_ready():
            body = orjson.dumps({"status": "not ready", "reasons": reasons})
            await send_json(send, body, 503, [("retry-after", "1")])
        else:
            await send_json(send, b'{"status":"ready"}')

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, CONTENT_TYPE, self._metrics.text())

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, encode_status(self.site_status()))

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
