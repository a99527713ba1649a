"""Attacks stopped by each tier of isolation: every attempt of attacks.py at each tier, beside a neighbour that must notice nothing.

docs/isolation.md is made by these runs (PILOTLIGHT_WRITE_DOCS=1 rewrites it) and may contain nothing else.
"""

import asyncio
import inspect
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.functions.channel import Failure
from pilotlight.functions.host.confinement.isolation import IsolationError
from pilotlight.functions.host.site_functions import SiteFunctions
from tests.functions.conftest import Served, ServedMaker, working_oci_runtime
from tests.functions.host import attacks
from tests.functions.host.test_hostile import GOOD

pytestmark = pytest.mark.process

ATTEMPTS = [name for name in vars(attacks.Attempts) if not name.startswith("_")]
WAITING = ("blocks_its_event_loop", "prints_without_end")
DOCUMENT = Path(__file__).parents[4] / "docs/isolation.md"
TIGHT = {"cpu_ms": 500, "blocked_s": 30.0, "threads": 24, "response_mib": 4.0, "subrequests": 50, "open_files": 64}
BEGIN, END = "<!-- made by tests/functions/host/confinement/test_isolation.py -->\n", "<!-- end -->\n"


@pytest.fixture
def public() -> Iterator[Path]:
    """Make a folder that every user of the machine can read.

    pytest's own is closed to others, which would hide the gaps of a tier.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-public-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "open").write_text("a neighbour's")
        (folder / "secret").write_text("the site's own")
        (folder / "secret").chmod(0o600)
        yield folder


@pytest.mark.skipif(os.getuid() != 0, reason="the document describes a site that was started as root")
@pytest.mark.timeout(900)
async def test_the_document_says_what_each_tier_stops(make_served: ServedMaker, public: Path) -> None:
    columns = []
    oci_runtime = working_oci_runtime()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        query = f"secret={public / 'secret'}&neighbour={public / 'open'}&port={listener.getsockname()[1]}"
        for tier in (1, 2, 3) if oci_runtime is not None else (1, 2):
            async with make_served(tier=tier, limits=TIGHT, oci_runtime=oci_runtime) as served:
                columns.append(await outcomes(served, query))
    heads = [f"tier {tier}" for tier in range(1, len(columns) + 1)]
    rows = [["a function that", *heads], ["---"] * (1 + len(heads))]
    rows += [[_words(name), *cells] for name, *cells in zip(ATTEMPTS, *columns, strict=True)]
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("PILOTLIGHT_WRITE_DOCS"):
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    else:  # without an OCI runtime its column is taken from the file
        written = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found.strip().splitlines()]
        assert [cells[: len(rows[0])] for cells in written] == rows


async def outcomes(served: Served, query: str) -> list[str]:
    for name in ("bad", "waiting"):
        served.add(inspect.getsource(attacks), name)
    waiting = served.functions.pools["waiting"]
    waiting.factory.limits = replace(waiting.factory.limits, blocked_s=0.3)  # for attempts that only wait
    for name in ("good", "victim"):
        served.add(GOOD, name)
        await served.get(name=name)
    victim = served.functions.pools["victim"].isolates.living[0]
    assert victim.process.child is not None
    asking = asyncio.create_task(keep_asking(served))
    found = []
    try:
        for name in ATTEMPTS:
            path = f"/{name}?{query}&pid={victim.process.child.pid}"
            pool = "waiting" if name in WAITING else "bad"
            found.append(await asyncio.wait_for(outcome_of_a_start(served, path, pool), 180))
            assert not asking.done(), asking.exception()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert [served.functions.pools[name].isolates.num_started for name in ("good", "victim")] == [1, 1]
    return found


async def keep_asking(served: Served) -> None:
    while True:
        assert await served.get(name="good") == b"well"
        await asyncio.sleep(0.01)


async def outcome_of_a_start(served: Served, path: str, name: str) -> str:
    """Return the outcome, retrying a failed start.

    While processes that an earlier attempt has forked are still ending, its user may start no process; after a failed start none is tried for a
    while.
    """
    while True:
        try:
            return await outcome(served, path, name)
        except NotStarted:
            await asyncio.sleep(0.05)


class NotStarted(Exception):
    pass


async def outcome(served: Served, path: str, name: str) -> str:
    pool = served.functions.pools[name]
    try:
        response = await served.ask(path, name=name)
        headers = dict(response.headers)
        if response.stream is None and "x-spin" not in headers:
            return "**not stopped**"
        isolate = pool.isolates.living[0]
        if response.stream is not None and "x-leave" not in headers:
            async for _ in response.stream:
                pass
            return "**not stopped**"
        if response.stream is not None:  # its client disconnects
            await anext(response.stream)
            await response.stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(isolate.until_gone(), 60)
        return said(await isolate.exit_fault())
    except Failure as failure:
        if "cannot be started" in failure.message or failure.code == "overloaded":
            raise NotStarted from None
        return said(failure)


def said(failure: Failure) -> str:
    """Return the exception that the author sees, or the runtime's description of the end."""
    if failure.name == "Crashed":
        return "its process ends; the next request gets a new one"
    if failure.name == "LimitExceeded":
        return f"ended: {_words(str(failure.code))}"
    return f"`{failure.name}`" if failure.name != "Error" else f"refused: {_words(str(failure.code))}"


def _words(name: str) -> str:
    return name.replace("_", " ")


async def test_a_site_does_not_start_below_the_tier_that_its_file_demands() -> None:
    with pytest.raises(
        IsolationError, match=r"offers isolation of tier 1, and 2 is demanded .*lower functions.min_tier"
    ):
        async with SiteFunctions(min_tier=2, max_tier=1):
            pass
