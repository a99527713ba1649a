"""Of a function's versions one has the function's queues, clocks and bindings at a time."""

from typing import Any, cast

from runtime.functions.host.site import SiteFunctions
from tests.asgi import eventually


class Bindings:
    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self) -> None:
        self.told.append("start")

    async def stop(self) -> None:
        self.told.append("stop")


async def test_the_version_before_stops_when_another_is_live() -> None:
    functions, versions = SiteFunctions(), {"f@1": Bindings(), "f@2": Bindings()}
    functions._bindings = cast("Any", versions)
    for pool in ("f@1", "f@1", "f@2", "f@1"):
        functions.live("f", pool)
        assert functions.names == {"f": pool}
    await eventually(lambda: versions["f@2"].told == ["start", "stop"])
    assert versions["f@1"].told.count("start") == 2
    assert versions["f@1"].told.count("stop") == 1
