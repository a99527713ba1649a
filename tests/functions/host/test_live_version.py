"""Only one version of a function at a time has its queues, cron triggers and bindings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pilotlight.functions.host.site_functions import SiteFunctions
from pilotlight.functions.manifest import load_manifest
from tests.functions.conftest import ServedMaker


class Bindings:
    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, ask: Any) -> None:
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")


async def test_the_version_before_stops_when_another_is_live() -> None:
    functions, versions = SiteFunctions(), {"f@1": Bindings(), "f@2": Bindings()}
    functions.pools = cast("Any", {name: SimpleNamespace(bindings=bindings) for name, bindings in versions.items()})
    for pool in ("f@1", "f@1", "f@2", "f@1"):
        functions.live("f", pool)
        assert functions.names == {"f": pool}
    assert versions["f@1"].told == ["start", "stop", "start"]
    assert versions["f@2"].told == ["start", "stop"]


async def test_a_version_with_a_name_of_its_own_stands_beside_the_others(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"')
    manifest = load_manifest(tmp_path)
    async with make_served(tier=1) as served:
        pools, seen = served.functions.pools, []
        for name in (None, "f@1", "f@2", "f@1"):
            served.functions.add(manifest, name=name)
            seen.append(pools[name or "f"])
        assert pools == {"f": seen[0], "f@1": seen[3], "f@2": seen[2]}
        served.functions.remove("f@1")
        assert pools == {"f": seen[0], "f@2": seen[2]}
