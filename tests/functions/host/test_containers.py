"""Tier 3: functions in containers, if this machine has an OCI runtime that works."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.site_functions import SiteFunctions
from pilotlight.functions.sandbox.confinement.isolation import IsolationError
from tests.functions.conftest import Served, ServedMaker

pytestmark = pytest.mark.process

LOOKS = """
    import os
    from pathlib import Path
    from workers import WorkerEntrypoint, Response

    started = os.getpid()

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            path = request.url.removeprefix("http://host")
            if path == "/die":
                os._exit(3)
            if path == "/write":
                Path("/tmp/kept").write_text("here")
            return Response(f"{os.getuid()} {os.getpid()} {sorted(os.listdir('/tmp'))} {os.uname().nodename}")
"""


@pytest.fixture
async def contained(make_served: ServedMaker, oci_runtime: str) -> AsyncIterator[Served]:
    async with make_served(tier=3, oci_runtime=oci_runtime) as served:
        yield served


async def test_a_function_answers_from_its_container_and_neighbours_have_others(contained: Served) -> None:
    for name in ("f", "g"):
        contained.add(LOOKS, name)
    await contained.get("/write")
    first, second = (await contained.get(name="f")).decode(), (await contained.get(name="g")).decode()
    assert "'kept'" in first
    assert "'kept'" not in second
    assert first.split()[0] != second.split()[0]  # different user ids
    assert first.endswith(" function")
    assert contained.functions.isolation == (3, "")


async def test_an_isolate_that_dies_is_replaced_within_the_same_container(contained: Served) -> None:
    contained.add(LOOKS)
    await contained.get("/write")
    container = _container_of(contained)
    with pytest.raises(Fault, match="exit status 3"):
        await contained.get("/die")
    assert b"'kept'" in await contained.get()
    assert _container_of(contained) == container


async def test_a_killed_container_fails_its_requests_and_the_next_request_gets_another_one(contained: Served) -> None:
    contained.add(LOOKS)
    await contained.get("/write")
    os.kill(_container_of(contained), signal.SIGKILL)
    failures = 0
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await contained.get()
            except Fault:
                failures += 1
                continue
            if failures:
                break
    assert b"'kept'" not in answer


async def test_a_site_that_stops_leaves_no_container_behind(
    make_served: ServedMaker, oci_runtime: str, tmp_path: Path
) -> None:
    async with make_served(tier=3, oci_runtime=oci_runtime, state_dir=tmp_path / "state") as served:
        served.add(LOOKS)
        await served.get()
        first = _container_of(served)
        assert list((tmp_path / "state/oci/bundles").iterdir())
    assert not (tmp_path / "state/oci").exists()
    assert not _is_there(first)


async def test_containers_end_with_a_site_that_is_killed_and_its_next_life_removes_what_it_left(
    make_served: ServedMaker, oci_runtime: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    script = f"""
import asyncio
from pathlib import Path
from pilotlight.functions.host.site_functions import SiteFunctions

async def main():
    async with SiteFunctions(min_tier=3, oci_runtime={oci_runtime!r}, state_dir=Path({str(state)!r})) as functions:
        made = functions._supply._zygotes.create_zygote(_limits(functions), [], 2)
        await made.started()
        print(made._child.pid, flush=True)
        await asyncio.sleep(60)

def _limits(functions):
    from pilotlight.functions.sandbox.confinement.confinement import Confinement
    return Confinement(3, {str(tmp_path)!r}, [], "/tmp", 240_000, 128, 16, 64, 64)

asyncio.run(main())
"""
    site = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert site.stdout is not None
    first = int(await asyncio.wait_for(site.stdout.readline(), 60))
    site.kill()
    await site.wait()
    async with asyncio.timeout(60):
        while _is_there(first):
            await asyncio.sleep(0.02)
    left = _names_in(state / "oci/bundles")
    assert left
    async with make_served(tier=3, oci_runtime=oci_runtime, state_dir=state):
        assert not left & (_names_in(state / "oci/bundles") | _names_in(state / "oci/run"))


async def test_an_oci_runtime_that_is_named_and_missing_stops_the_start_and_says_what_to_install(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        IsolationError, match=r"'no-such-runtime' \(functions.oci_runtime\) is not installed on this machine"
    ):
        async with SiteFunctions(oci_runtime="no-such-runtime"):
            pass
    with pytest.raises(IsolationError, match="apt-get install crun"):
        async with SiteFunctions(oci_runtime=str(tmp_path / "crun")):
            pass


async def test_tier_3_without_a_runtime_in_the_file_is_refused_and_says_which_key_is_missing() -> None:
    with pytest.raises(IsolationError, match=r"3 is demanded \(tier 3: functions.oci_runtime names no OCI runtime"):
        async with SiteFunctions(min_tier=3):
            pass


@pytest.mark.skipif(os.getuid() != 0, reason="containers need root")
async def test_what_the_oci_runtime_says_of_its_failure_is_published_and_the_next_tier_serves(tmp_path: Path) -> None:
    broken = _program(
        tmp_path / "broken", 'while [ "$1" != --log ]; do shift; done\necho "no cgroups for you" > "$2"\nexit 1'
    )
    async with SiteFunctions(oci_runtime=str(broken)) as functions:
        assert functions.isolation.tier in (1, 2)
        assert "tier 3: broken: no cgroups for you" in functions.isolation.why_not_more
    with pytest.raises(IsolationError, match="no cgroups for you"):
        async with SiteFunctions(oci_runtime=str(broken), min_tier=3):
            pass


def _container_of(served: Served, name: str = "f") -> int:
    """Return the pid of the container's first process."""
    zygote = served.functions.pools[name].factory.zygote.current
    assert zygote is not None
    return zygote.pid


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
