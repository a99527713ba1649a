"""The zygote of one version: created on demand, and ended together with its resources."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.host.isolates.scratch import Scratch
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.host.zygotes.pool_zygote import SETTLED_S, PoolContext, PoolZygote
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser, UserIds
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError
from tests.clock import Clock

LIMITS = FunctionLimits(memory_mib=64, disk_mib=16, open_files=99, threads=7, max_isolates=3)


class Zygote:
    memory_mib = 12

    def __init__(self) -> None:
        self.is_alive, self.is_closed, self.why = True, False, ""
        self.asked: list[bool] = []

    def why_ended(self, limits: FunctionLimits, *, is_asleep: bool) -> str:
        self.asked.append(is_asleep)
        return self.why

    def fail(self, why: str) -> None:
        self.why = f"failed: {why}"

    def close(self) -> None:
        self.is_closed, self.is_alive = True, False


class Made:
    """A PoolZygote, the zygotes that it created, and their logs."""

    def __init__(self, folder: Path, tier: int) -> None:
        self.clock = Clock(1000.0)
        self.zygotes: list[Zygote] = []
        self.confinements: list[Confinement] = []
        self.logs: list[FunctionLog] = []
        self.asked: list[list[str]] = []
        self.refuses = False
        (folder / "entry.py").write_text("import json")
        manifest: Any = SimpleNamespace(directory=folder, main=folder / "entry.py")
        user = FunctionUser(UserIds(is_root=False))
        self.scratch = Scratch(folder / "scratch", 16, user)
        context = PoolContext(cast(Any, self), tier, user, folder / "scratch")
        packages: Any = SimpleNamespace(layers=["/layer"])
        self.zygote = PoolZygote(manifest, LIMITS, context, packages, self.scratch, self._new_log, self.clock)

    def _new_log(self) -> FunctionLog:
        self.logs.append(FunctionLog("f", 64))
        return self.logs[-1]

    def create_zygote(self, limits: Confinement, imports: list[str], log_fd: int) -> Zygote:
        assert log_fd == self.logs[-1].write_fd >= 0
        if self.refuses:
            raise ZygoteError("no room")
        self.confinements.append(limits)
        self.asked.append(imports)
        self.zygotes.append(Zygote())
        return self.zygotes[-1]


@pytest.fixture(params=[1, 2])
async def made(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    found = Made(tmp_path, request.param)
    yield found
    found.zygote.close()


def num_pipes() -> int:
    return sum(path.is_fifo() for path in Path("/proc/self/fd").iterdir())


async def test_a_living_zygote_is_kept_and_one_that_is_dead_is_replaced(made: Made, tmp_path: Path) -> None:
    assert not made.zygote.is_alive
    before = num_pipes()
    first = cast(Any, made.zygote.get())
    assert (made.zygote.get(), made.zygote.is_alive, made.asked) == (first, True, [["json"]])
    tier = made.confinements[0].tier
    assert made.confinements[0] == Confinement(
        tier, str(tmp_path), ["/layer"], str(tmp_path / "scratch"), None, 64, 16, 99, 7, 3
    )
    assert made.scratch.path.exists() == (tier < 2), "from tier 2 on it has a separate file system"
    first.is_alive = False
    second = made.zygote.get()
    assert (second is first, first.is_closed, len(made.zygotes)) == (False, True, 2)
    assert [log.write_fd for log in made.logs] == [-1, -1], "only the processes keep the write ends"
    made.zygote.close()
    assert num_pipes() == before, "the read ends are closed, too"


async def test_one_that_does_what_it_must_not_is_ended_and_the_next_is_another(made: Made) -> None:
    made.zygote.fail("nothing is there yet")
    zygote = cast(Any, made.zygote.get())
    zygote.why = "it forks"
    assert made.zygote.watch(is_asleep=False) == "it forks"
    made.zygote.fail("it forks")
    assert (zygote.why, zygote.is_closed, made.zygote.current, made.zygote.is_alive) == (
        "failed: it forks", True, None, False,
    )  # fmt: skip
    assert made.zygote.watch(is_asleep=False) == ""
    assert made.zygote.get() is not zygote


async def test_one_that_cannot_be_made_leaves_no_descriptor(made: Made) -> None:
    made.refuses = True
    with pytest.raises(ZygoteError, match="no room"):
        made.zygote.get()
    assert (made.logs[0].write_fd, made.zygote.current) == (-1, None)
    made.refuses = False
    assert made.zygote.get() in cast(Any, made.zygotes)


async def test_one_that_sleeps_is_measured_once_when_it_has_settled(made: Made) -> None:
    began = made.clock.now
    assert made.zygote.watch(is_asleep=True) == ""
    zygote = cast(Any, made.zygote.get())
    seen = []
    looks = (
        (0.0, True, 12),
        (SETTLED_S, True, 12),
        (0.1, True, 12),
        (9.0, True, 99),
        (1.0, False, 99),
        (1.0, True, 99),
    )
    for after_s, is_asleep, mib in looks:
        made.clock.now += after_s
        zygote.memory_mib = mib
        made.zygote.watch(is_asleep=is_asleep)
        seen.append((made.zygote.asleep_since, made.zygote.asleep_mib))
    last = made.clock.now
    assert seen == [(began, None), (began, None), (began, 12), (began, 12), (None, None), (last, None)]
    assert zygote.asked == [True, True, True, True, False, True]
    made.zygote.close()
    assert (zygote.is_closed, made.zygote.current, made.zygote.asleep_since) == (True, None, None)


async def test_what_it_imports_is_read_once(made: Made) -> None:
    await made.zygote.read_imports()
    await asyncio.to_thread((made.scratch.path.parent / "entry.py").write_text, "import csv")
    await made.zygote.read_imports()
    made.zygote.get()
    assert made.asked[0] == ["json"]
