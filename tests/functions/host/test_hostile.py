"""Hostile functions beside a normal one, at each tier: attacks are stopped and logged, and the neighbour is not disturbed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.site_functions import SiteFunctions
from tests.functions.conftest import Served, quick

GOOD = """
from workers import WorkerEntrypoint, Response
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("well")
"""
WMEM_DEFAULT = int(Path("/proc/sys/net/core/wmem_default").read_text())
TIERS = pytest.mark.parametrize("tier", [1, 2])
Sites = dict[int, Served]
pytestmark = pytest.mark.asyncio(loop_scope="module")


def hostile(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"import asyncio, os, sys, time\nfrom workers import *\n\nclass Default(WorkerEntrypoint):\n    async def fetch(self, request):\n{lines}\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(process_tier: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sites]:
    """Start one site per tier, each with the neighbour, whose process must survive all tests."""
    folder = tmp_path_factory.mktemp("hostile")
    async with (
        SiteFunctions(limits=quick({}), min_tier=1, max_tier=1) as first,
        SiteFunctions(limits=quick({}), min_tier=2, max_tier=2) as second,
    ):
        found = {tier: Served(functions, folder / str(tier)) for tier, functions in ((1, first), (2, second))}
        for served in found.values():
            served.add(GOOD, "good", limits={"idle_s": 3600.0})
            await served.get(name="good")
        yield found


@asynccontextmanager
async def beside_a_good_one(served: Served, source: str, **limits: Any) -> AsyncIterator[Served]:
    """Yield the site with a hostile function; meanwhile the neighbour gets requests, none of which may fail."""
    served.add(source, "bad", limits=limits)
    asked = 0

    async def keep_asking() -> None:
        nonlocal asked
        while True:
            assert await served.get(name="good") == b"well"
            asked += 1
            await asyncio.sleep(0.005)

    neighbour = asyncio.create_task(keep_asking())
    try:
        yield served
        while asked == 0 and not neighbour.done():
            await asyncio.sleep(0.005)
        assert not neighbour.done(), neighbour.exception()
    finally:
        neighbour.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await neighbour
    assert served.functions.pools["good"].isolates.num_started == 1


async def fault_of(served: Served, **options: Any) -> Fault:
    with pytest.raises(Fault) as failed:
        await asyncio.wait_for(served.get(name="bad", **options), 60)
    return failed.value


@TIERS
async def test_a_function_that_loops_for_ever_is_ended_at_its_cpu_limit_with_its_line(sites: Sites, tier: int) -> None:
    source = hostile("x = 0\nwhile True:\n    x += 1  # for ever")
    async with beside_a_good_one(sites[tier], source, cpu_ms=100, blocked_s=20.0) as served:
        fault = await fault_of(served)
    assert fault.code == "cpu_time"
    assert "more than 100 ms of CPU time" in fault.message
    assert 'entry.py", line' in fault.detail
    assert "in fetch" in fault.detail


@TIERS
async def test_a_function_that_blocks_its_loop_is_ended_with_the_line_where_it_waits(sites: Sites, tier: int) -> None:
    source = hostile("time.sleep(60)")
    async with beside_a_good_one(sites[tier], source, blocked_s=0.2) as served:
        fault = await fault_of(served)
    assert (fault.code, "blocked its event loop for more than 0.2 s" in fault.message) == ("blocked", True)
    assert 'entry.py", line 6 in fetch' in fault.detail


@TIERS
async def test_a_function_that_allocates_without_end_gets_a_memory_error_at_its_line(sites: Sites, tier: int) -> None:
    source = hostile("hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))")
    async with beside_a_good_one(sites[tier], source) as served:
        fault = await fault_of(served)
    assert fault.name in ("MemoryError", "LimitExceeded")
    assert "entry.py" in fault.detail


@TIERS
async def test_a_function_that_forks_without_end_does_not_outlive_itself(sites: Sites, tier: int) -> None:
    source = hostile("while True:\n    if os.fork() == 0:\n        time.sleep(60)")
    async with beside_a_good_one(sites[tier], source, threads=16) as served:
        fault = await fault_of(served)
    assert fault.name == ("PermissionError" if tier == 2 else "BlockingIOError")
    assert "os.fork()" in fault.detail


@TIERS
async def test_a_function_that_exits_is_reported_and_serves_again(sites: Sites, tier: int) -> None:
    source = hostile(
        """
if request.url.endswith('/os'):
    os._exit(3)
if request.url.endswith('/sys'):
    sys.exit(4)
return Response('ok')
"""
    )
    async with beside_a_good_one(sites[tier], source) as served:
        assert "ended its process with exit status 3" in (await fault_of(served, path="/os")).message
        assert await served.get(name="bad") == b"ok"
        assert "called exit(4)" in (await fault_of(served, path="/sys")).message
        assert await served.get(name="bad") == b"ok"


@TIERS
async def test_a_function_that_kills_its_own_process_is_named_with_the_signal(sites: Sites, tier: int) -> None:
    source = hostile("import ctypes\nctypes.string_at(0)")
    async with beside_a_good_one(sites[tier], source) as served:
        assert "was killed by signal 11" in (await fault_of(served)).message


@TIERS
async def test_a_function_that_writes_a_gigabyte_is_stopped_at_its_disk_limit(sites: Sites, tier: int) -> None:
    source = hostile(
        """
with open(os.environ['TMPDIR'] + '/big', 'wb') as f:
    for _ in range(1024):
        f.write(bytes(1 << 20))
        f.flush()
"""
    )
    async with beside_a_good_one(sites[tier], source) as served:
        fault = await fault_of(served)
    # The watch may see the full directory before the function's write fails.
    assert (fault.name, "File too large" in fault.message) == ("OSError", True) or "more than 16 MiB" in fault.message


async def test_a_function_that_writes_many_files_is_stopped_at_its_disk_limit_at_tier_2(sites: Sites) -> None:
    """Tier 1 limits the size of each file, not the sum."""
    source = hostile(
        """
for i in range(64):
    with open(f"{os.environ['TMPDIR']}/{i}", 'wb') as f:
        f.write(bytes(1 << 20))
"""
    )
    async with beside_a_good_one(sites[2], source) as served:
        assert "No space left" in (await fault_of(served)).message


@TIERS
async def test_a_function_that_prints_a_gigabyte_waits_for_its_own_log(sites: Sites, tier: int) -> None:
    source = hostile("while True:\n    print('x' * 1000)")
    async with beside_a_good_one(sites[tier], source, blocked_s=0.2) as served:
        fault = await fault_of(served)
        assert len(served.functions.pools["bad"].isolates.living) == 0
    assert fault.code == "blocked"
    assert "in fetch" in fault.detail


async def test_a_stream_of_the_wrong_type_is_named(sites: Sites) -> None:
    source = hostile("async def pieces():\n    yield 7\nreturn Response(pieces())")
    async with beside_a_good_one(sites[2], source) as served:
        assert "stream gave int" in (await fault_of(served)).message


@TIERS
async def test_a_function_reads_nothing_of_its_neighbours_or_the_sites(sites: Sites, tier: int) -> None:
    source = hostile("return Response(open(request.headers['x-path']).read())")
    served = sites[tier]
    served.add(source, "bad", limits={})
    secret = served.folder / "secret"
    secret.write_text("the site's own")
    secret.chmod(0o600)
    for path in (str(secret), "/etc/shadow"):
        fault = await fault_of(served, headers=[("x-path", path)])
        assert fault.name in ("PermissionError", "FileNotFoundError")
    if tier == 2:  # also files of other users with public read permission
        neighbour = str(served.folder / "good/src/entry.py")
        for path in (neighbour, "/etc/passwd", "/proc/1/environ"):
            assert (await fault_of(served, headers=[("x-path", path)])).name == "FileNotFoundError"


async def test_a_function_opens_no_sockets_and_gains_no_namespaces_at_tier_2(sites: Sites) -> None:
    source = hostile(
        "import socket, ctypes\nwhat = request.url.rpartition('/')[2]\nif what == 'socket':\n    socket.create_connection(('127.0.0.1', 1))\n"
        "if what == 'unix':\n    socket.socket(socket.AF_UNIX)\nif what == 'exec':\n    os.execv('/bin/sh', ['sh'])\n"
        "libc = ctypes.CDLL(None, use_errno=True)\nif what == 'unshare' and libc.unshare(0x10000000) == 0:\n    return Response('bad')\n"
        "raise PermissionError('refused')"
    )
    async with beside_a_good_one(sites[2], source) as served:
        for what in ("socket", "unix", "exec", "unshare"):
            assert (await fault_of(served, path=f"/{what}")).name == "PermissionError", what


@TIERS
async def test_a_function_has_no_descriptors_but_its_own(sites: Sites, tier: int) -> None:
    source = hostile(
        """
found = []
for fd in range(3, 200):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
return Response.json(found)
"""
    )
    served = sites[tier]
    served.add(source, "bad", limits={})
    assert (
        len(json.loads(await served.get(name="bad"))) <= 8
    )  # the channel, the trace, the zygote's poll, and the event loop's selector and pair


async def test_a_missing_import_is_reported_with_its_line_and_is_not_permanent(sites: Sites) -> None:
    async with beside_a_good_one(sites[2], "import not_there\n") as served:
        fault = await fault_of(served)
        assert "No module named 'not_there'; packages are named in dependencies of pyproject.toml" in fault.message
        assert "or in requirements.txt" in fault.detail
        assert 'entry.py", line 1' in fault.detail
        served.add(GOOD, "bad")
        assert await served.get(name="bad") == b"well"


async def test_a_module_that_never_ends_importing_is_ended_with_its_line(sites: Sites) -> None:
    async with beside_a_good_one(sites[2], "while True:\n    pass\n", start_s=0.5) as served:
        fault = await fault_of(served)
    assert "not imported within 0.5 s" in fault.message
    assert 'entry.py", line' in fault.detail


async def test_a_function_that_speaks_nonsense_on_its_socket_is_cut_off(sites: Sites) -> None:
    source = hostile(
        """
for fd in range(3, 20):
    try:
        os.write(fd, bytes([255]) * 100)
    except OSError:
        pass
await asyncio.sleep(30)
"""
    )
    async with beside_a_good_one(sites[2], source) as served:
        assert "broke the protocol" in (await fault_of(served)).message


async def test_a_request_beyond_its_wall_time_fails_and_the_function_continues(sites: Sites) -> None:
    source = hostile("await asyncio.sleep(0 if request.url.endswith('/quick') else 60)\nreturn Response('ok')")
    async with beside_a_good_one(sites[2], source, wall_s=0.1) as served:
        assert (await fault_of(served)).code == "wall_time"
        assert await served.get("/quick", name="bad") == b"ok"


async def test_subrequests_that_claim_no_request_are_counted_with_the_one_that_is_open(sites: Sites) -> None:
    source = hostile(
        """
from workers.http.outbound import current_request
made = 0
for i in range(30):
    current_request.set(-1 if i % 2 else 10**6)
    try:
        await fetch('http://127.0.0.1:1/')
    except Exception as error:
        made += 'subrequests' not in str(error)
return Response(str(made))
"""
    )
    served = sites[2]
    served.add(source, "bad", limits={"subrequests": 5})
    assert await served.get(name="bad") == b"5"


async def test_what_a_function_holds_in_sockets_and_pipes_is_bounded_by_its_descriptors_at_tier_2(sites: Sites) -> None:
    """The kernel's default buffer is 208 KiB; a socket accepts one more chunk than that."""
    source = hostile(
        """
import socket
ends, held = [], 0
try:
    while True:
        ends += socket.socketpair()
except OSError:
    pass
for end in ends:
    end.setblocking(False)
    for size in (65536, 4096, 1):
        try:
            while True:
                held += end.send(bytes(size))
        except BlockingIOError:
            pass
return Response(f"{len(ends)} {held}")
"""
    )
    served = sites[2]
    served.add(source, "bad", limits={"open_files": 128})
    num_ends, held = map(int, (await served.get(name="bad")).split())
    assert 64 < num_ends < 128
    assert held < 128 * 1.5 * WMEM_DEFAULT


async def test_a_manifest_lowers_the_sites_limits_and_does_not_raise_them(sites: Sites) -> None:
    served = sites[2]
    for name, wanted, given in (("few", 2, 2), ("many", 5000, 1000)):
        served.add(GOOD, name, manifest=f"[limits]\nsubrequests = {wanted}")
        assert served.functions.pools[name].factory.limits.subrequests == given
    for name, wanted, given in (("low", 50, 50), ("high", 300_000, 3000)):
        served.add(GOOD, name, manifest=f"[limits]\ncpu_ms = {wanted}", limits={"cpu_ms": 3000})
        assert served.functions.pools[name].factory.limits.cpu_ms == given


async def test_what_a_function_prints_or_raises_moves_no_terminal(sites: Sites) -> None:
    text = "\\x1b[2J\\rsite: forged\\x9b1A\\u202e\\u2028\\x00\\x7f\\tend \\xe9"
    source = hostile(f"print('{text}', flush=True)\nraise ValueError('{text}')")
    served = sites[2]
    lines: list[str] = []
    served.add(source, "bad", limits={})
    served.functions.pools["bad"].reports.follow = lines.append
    fault = await fault_of(served)
    await served.functions.pools["bad"].close()
    printed = next(line for line in lines if line.startswith("\\x1b"))
    assert printed == "\\x1b[2J\\rsite: forged\\x9b1A\\u202e\\u2028\\x00\\x7f\tend \xe9"
    assert printed in fault.message
    assert all(c in "\n\t" or c.isprintable() for line in [*lines, fault.message, fault.detail] for c in line)
