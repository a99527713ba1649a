"""Only one version of a function at a time has its queues, cron triggers and bindings."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.site_functions import SiteFunctions
from pilotlight.functions.manifest import Manifest, load_manifest
from pilotlight.support.database import Databases
from tests.functions.conftest import ServedMaker


class Bindings:
    def __init__(self, num_failures: int = 0) -> None:
        self.told: list[str] = []
        self.num_failures = num_failures  # starts that fail

    def start(self, ask: Any) -> None:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise Failure("its queue is another function's")
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")

    async def close(self) -> None:
        self.told.append("close")


async def test_the_version_before_stops_when_another_is_live() -> None:
    functions, versions = SiteFunctions(), {"f@1": Bindings(), "f@2": Bindings()}
    functions.pools = cast("Any", {name: SimpleNamespace(bindings=bindings) for name, bindings in versions.items()})
    for pool in ("f@1", "f@1", "f@2", "f@1"):
        functions.live("f", pool)
        assert functions.names == {"f": pool}
    assert versions["f@1"].told == ["start", "stop", "start"]
    assert versions["f@2"].told == ["start", "stop"]


async def test_a_version_that_cannot_be_started_leaves_the_one_before_live_and_may_be_tried_again() -> None:
    functions, versions = SiteFunctions(), {"f@1": Bindings(), "f@2": Bindings(num_failures=1)}
    functions.pools = cast("Any", {name: SimpleNamespace(bindings=bindings) for name, bindings in versions.items()})
    functions.live("f", "f@1")
    with pytest.raises(Failure, match="its queue"):
        functions.live("f", "f@2")
    assert functions.names == {"f": "f@1"}
    assert versions["f@1"].told == ["start"]
    functions.live("f", "f@2")
    assert functions.names == {"f": "f@2"}
    assert (versions["f@1"].told, versions["f@2"].told) == (["start", "stop"], ["start"])


async def test_a_live_version_is_replaced_by_one_that_can_be_started(make_served: ServedMaker, tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"')
    manifest, made = load_manifest(tmp_path), [Bindings(), Bindings(num_failures=1), Bindings()]
    following = iter(made)
    async with make_served(tier=1, open_bindings=lambda manifest, functions: next(following)) as served:
        functions = served.functions
        functions.add(manifest, name="f@1")
        functions.live("f", "f@1")
        pool = functions.pools["f@1"]
        with pytest.raises(Failure, match="its queue"):
            functions.add(manifest, name="f@1")
        assert functions.version("f") is pool
        assert made[0].told == ["start"]
        functions.add(manifest, name="f@1")
        assert functions.version("f") is functions.pools["f@1"] is not pool
        assert (made[0].told, made[2].told) == (["start", "stop"], ["start"])


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


TRIED = """
from workers import DurableObject, Response, WorkerEntrypoint
class First(DurableObject):
    async def who(self):
        return "first of VERSION"
class Second(DurableObject):
    async def who(self):
        return "second of VERSION"
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        first = await self.env.FIRST.getByName("a").who()
        second = await self.env.SECOND.getByName("a").who() if "SECOND" in self.env else ""
        return Response(f"{first} {second} {await self.env.SELF.who()}")
    async def who(self):
        return "self of VERSION"
"""


async def test_a_version_that_is_tried_reaches_its_own_objects_and_entrypoints(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    bindings = partial(FunctionBindings.open, tmp_path / "state", Services(databases=Databases()))

    def version(number: int, *classes: str) -> Manifest:
        (folder := tmp_path / str(number)).mkdir()
        bound = "".join(
            f'[[durable_objects.bindings]]\nname = "{name.upper()}"\nclass_name = "{name}"\n' for name in classes
        )
        text = f'name = "f"\nmain = "entry.py"\n{bound}[[services]]\nbinding = "SELF"\nservice = "f"\n'
        (folder / "wrangler.toml").write_text(text)
        (folder / "entry.py").write_text(TRIED.replace("VERSION", str(number)))
        return load_manifest(folder)

    async with make_served(tier=1, open_bindings=bindings) as served:
        functions = served.functions
        functions.add(version(1, "First"), name="f@1")
        assert await served.get(name="f@1") == b"first of 1  self of 1"
        with pytest.raises(Failure, match="no function named 'f'"):
            functions.version("f")
        functions.live("f", "f@1")
        functions.add(version(2, "First", "Second"), name="f@2")
        assert await served.get(name="f@2") == b"first of 1 second of 2 self of 1"
