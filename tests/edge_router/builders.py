"""Builders of objects for the router's tests, and a clock that only tests move."""

from typing import Any

from msgspec.structs import replace

from pilotlight.edge_router.routing.views import BackendView
from pilotlight.sites.config import parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.wire.hop.status import ModelStatus, Place, ProcessStatus, SiteStatus

PLACES = {
    "ams1": Place("Amsterdam", 52.31, 4.76),
    "iad1": Place("Washington", 38.94, -77.46),
    "sin1": Place("Singapore", 1.36, 103.99),
}


def place_of(name: str) -> Place:
    return PLACES.get(name, PLACES["ams1"])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def model_status(name: str = "ember", **fields: Any) -> ModelStatus:
    return ModelStatus(name, fields.pop("residency", "device"), **fields)


def site_status(name: str = "ams1", sequence: int = 1, pid: int = 1, **fields: Any) -> SiteStatus:
    values: dict[str, Any] = {
        "ready": True, "draining": False, "inflight": 0, "max_inflight": 256, "models": (model_status(),),
        "place": place_of(name), "version": "0",
        "processes": (ProcessStatus("site", pid, name),),
    }  # fmt: skip
    return SiteStatus(site=name, sequence=sequence, **{**values, **fields})


def view(name: str = "ams1", **fields: Any) -> BackendView:
    """Return a healthy, idle site with a round trip of 1 ms.

    `site` has fields of its status, `model` has fields of its model.
    """
    site = fields.pop("site", {})
    if "model" in fields:
        site = {**site, "models": (model_status(**fields.pop("model")),)}
    plain = BackendView(
        name,
        "healthy",
        place_of(name),
        1.0,
        1.0,
        status=site_status(name, **site),
        status_is_fresh=True,
    )
    return replace(plain, **fields)


def network(urls: dict[str, str], **tables: Any) -> NetworkConfig:
    sites = [
        {
            "name": name,
            "url": url,
            "place": {
                "city": place_of(name).city,
                "latitude": place_of(name).latitude,
                "longitude": place_of(name).longitude,
            },
        }
        for name, url in urls.items()
    ]
    place = {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76}
    return parse(NetworkConfig, {"listen": {"port": 0}, "place": place, "sites": sites, **tables}, "test")
