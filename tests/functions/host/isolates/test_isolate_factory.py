"""The isolates of one version: how they are started, and which resources end with them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.host.isolates.isolate_factory import IsolateFactory
from pilotlight.functions.host.zygotes.pool_zygote import PoolContext
from pilotlight.functions.manifest import BindingDeclaration, Manifest
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser, UserIds
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import MAY_RETURN, PriorityClass
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError


class Made:
    """A factory whose zygote and files are stand-ins that record events."""

    def __init__(self, folder: Path = Path("/f"), main: str = "entry.py", tier: int = 1) -> None:
        self.told: list[Any] = []
        declared = (BindingDeclaration("assets", "A", {"directory": "/secret", "html_handling": "none"}),)
        manifest = Manifest("hello", folder, folder / main, declared)
        context = PoolContext(cast("Any", None), tier, FunctionUser(UserIds(is_root=False)), folder)
        nothing = cast("Any", SimpleNamespace(new_log=None))
        self.factory = IsolateFactory(manifest, FunctionLimits(), context, nothing, nothing, nothing)
        zygote = SimpleNamespace(set_priority=self.told.append)
        self.factory.zygote = cast(
            "Any",
            SimpleNamespace(
                close=lambda: self.told.append("closed"), get=lambda: zygote, read_imports=self.read_imports
            ),
        )
        self.factory.scratch = cast("Any", SimpleNamespace(remove=self.removed, enforce=self.enforced))

    async def read_imports(self) -> None:
        self.told.append("imports")
        await asyncio.sleep(0)

    async def removed(self) -> None:
        self.told.append("removed")

    async def enforced(self, isolates: Any) -> None:
        self.told.append(("enforced", len(isolates)))
        try:
            await asyncio.Event().wait()
        finally:
            self.told.append("no longer enforced")


async def test_a_version_that_is_closed_while_its_imports_are_read_makes_no_zygote() -> None:
    made = Made()
    isolate = cast("Any", SimpleNamespace())
    starting = asyncio.ensure_future(made.factory.start(isolate, is_on_probation=False))
    await asyncio.sleep(0)
    assert made.told == ["imports"]
    await made.factory.close()
    with pytest.raises(ZygoteError, match="is being replaced"):
        await starting


async def test_what_a_version_has_had_ends_with_it_and_its_files_go_last() -> None:
    made = Made()
    made.factory.enforce_disk(cast("Any", [1, 2]))
    await asyncio.sleep(0)
    await made.factory.close()
    assert made.told == [("enforced", 2), "no longer enforced", "closed", "removed"]


async def test_files_are_looked_at_where_there_are_some_that_nothing_else_bounds_and_once_at_a_time() -> None:
    made = Made()
    made.factory.enforce_disk([])
    for _ in range(2):
        made.factory.enforce_disk(cast("Any", [1]))
        await asyncio.sleep(0)
    assert made.told == [("enforced", 1)]
    await made.factory.close()
    contained = Made(tier=2)
    contained.factory.enforce_disk(cast("Any", [1]))
    await asyncio.sleep(0)
    assert contained.told == []


@pytest.mark.parametrize(("main", "path"), [("entry.py", ["/f"]), ("src/entry.py", ["/f/src", "/f"])])
async def test_an_isolate_gets_the_folders_of_its_own_modules_and_no_folder_of_a_binding(
    main: str, path: list[str]
) -> None:
    made, started = Made(main=main), list[Any]()

    async def start(zygote: Any, boot: Any) -> None:
        started.append(boot)

    isolate = cast("Any", SimpleNamespace(start=start))
    for is_on_probation in (True, False):
        await made.factory.start(isolate, is_on_probation=is_on_probation)
    classes = [PriorityClass.BACKGROUND, PriorityClass.NORMAL]
    assert [each for each in made.told if each != "imports"] == (classes if MAY_RETURN else []), (
        "without root a lowered priority could not be raised again"
    )
    assert started[0].sys_path == path
    assert started[0].bindings == [("assets", "A", {"html_handling": "none"})]
