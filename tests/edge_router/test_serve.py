"""The router as a process: starting, refusing to start, stopping."""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from pilotlight.edge_router.app import build_app
from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.serve import SPARE_FILES, drain, http_limits, reload
from pilotlight.sites.network import DoorConfig, load_network
from pilotlight.wire.errors import ApiError
from pilotlight.wire.http.listen import PARENT_PID_ENV
from tests.edge_router.fakes import DONE, FakeSite, event, raw_stream, router, sites
from tests.waiting import until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def network_file(folder: Path, site_url: str, port: int = 0, extra: str = "", drain_timeout_s: int = 20) -> Path:
    path = folder / "network.toml"
    place = '{ city = "Amsterdam", latitude = 52.31, longitude = 4.76 }'
    path.write_text(
        f"place = {place}\n{extra}\n[listen]\nport = {port}\n[health]\ninterval_s = 0.05\n[relay]\n"
        f"drain_timeout_s = {drain_timeout_s}\n"
        f'[[sites]]\nname = "ams1"\nurl = "{site_url}"\nplace = {place}\n'
    )
    return path


@asynccontextmanager
async def process(file: Path, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start the router's process; yield it and its URL when it listens."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight.edge_router", str(file),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert running.stderr is not None
        line = (await running.stderr.readline()).decode().strip()
        yield running, line.rpartition("listening on ")[2]
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()  # to the end of the pipe, which closes it


def refused_start(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pilotlight.edge_router", str(file)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(url + "/readyz") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.02)


async def draining(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(url + "/readyz") as response:
            if (await response.json())["draining"]:
                assert response.status == 503
                return
        await asyncio.sleep(0.02)


async def started_stream(session: aiohttp.ClientSession, url: str, site: FakeSite) -> aiohttp.ClientResponse:
    site.behave = raw_stream(event(0), end="on command")
    response = await session.post(url + "/v1/chat/completions", json={"model": "ember", "stream": True})
    assert await response.content.readany() == event(0)
    return response


async def test_a_stop_signal_lets_an_open_stream_finish(tmp_path: Path) -> None:
    async with (
        sites("ams1") as [site],
        process(network_file(tmp_path, site.url)) as (router, url),
        aiohttp.ClientSession() as session,
    ):
        await ready(session, url)
        response = await started_stream(session, url, site)
        router.send_signal(signal.SIGTERM)
        await draining(session, url)
        site.go_on.set()
        assert await response.read() == event(99) + DONE
        assert await router.wait() == 0


async def test_a_hangup_reads_keys_and_limits_again_and_ends_nothing(tmp_path: Path) -> None:
    async with sites("ams1") as [site]:
        file = network_file(tmp_path, site.url)
        async with process(file) as (router, url), aiohttp.ClientSession() as session:
            await ready(session, url)
            response = await started_stream(session, url, site)
            digest = hashlib.sha256(b"secret").hexdigest()
            network_file(
                tmp_path,
                site.url,
                extra=f'[door]\nrequire_key = true\n[[keys]]\nname = "a"\nkey_sha256 = "{digest}"\n',
            )
            router.send_signal(signal.SIGHUP)
            while True:  # until the router has read the file
                async with session.get(url + "/metrics") as answer:
                    if answer.status == 401:
                        break
                await asyncio.sleep(0.02)
            site.go_on.set()
            assert await response.read() == event(99) + DONE
            assert router.returncode is None


async def test_prices_quotas_and_where_data_may_go_are_taken_over_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "a secret of sixteen bytes")
    kept = f'[ledger]\ndirectory = "{tmp_path}/ledger"\n'
    file = network_file(tmp_path, "http://127.0.0.1:1", extra=kept)
    network = load_network(file)
    app = build_app(network)
    router = app.edge
    accounting, places = router.accounting, router.proxy.selector.places
    try:
        assert (accounting.prices.price("m", 0.0), places.is_empty) == (None, True)
        accounting.quotas.reserve("acme", 10, 0)
        tables = '[[accounts]]\nname = "acme"\ntokens_per_day = 9\ndata = {sites = ["ams1"]}\n[[prices]]\nmodel = "*"\ninput = 1\noutput = 2\n'
        network_file(tmp_path, "http://127.0.0.1:1", extra=kept + tables)
        reload(app, network, file)
        assert accounting.prices.price("m", 0.0) is not None
        assert not places.is_empty
        with pytest.raises(ApiError, match="may have 9 tokens a day"):
            accounting.quotas.reserve("acme", 1, 0)
        assert "a restart is needed" not in caplog.text
    finally:
        assert accounting.ledger is not None
        await accounting.ledger.close()


async def test_a_second_signal_ends_open_streams_with_an_error_event(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(100),  # without the second signal it would wait for ten minutes
        sites("ams1") as [site],
        process(network_file(tmp_path, site.url, drain_timeout_s=600)) as (router, url),
        aiohttp.ClientSession() as session,
    ):
        await ready(session, url)
        response = await started_stream(session, url, site)
        router.send_signal(signal.SIGTERM)
        await draining(session, url)
        router.send_signal(signal.SIGINT)
        last = await response.read()
        assert last.startswith(b"data: ")
        assert b'"draining"' in last
        assert await router.wait() == 0


class Draining:
    """A fake proxy whose requests end on demand; `patience_s` has the argument of each call."""

    def __init__(self) -> None:
        self.patience_s: list[float] = []
        self.ended = asyncio.Event()

    async def drain(self, timeout_s: float) -> None:
        self.patience_s.append(timeout_s)
        if timeout_s:
            await self.ended.wait()


async def test_a_router_waits_for_its_requests_until_a_second_signal() -> None:
    for is_told_again in (False, True):
        proxy, stop_now = Draining(), asyncio.Event()
        draining = asyncio.create_task(drain(proxy, 600.0, stop_now))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not draining.done()
        (stop_now if is_told_again else proxy.ended).set()
        await asyncio.wait_for(draining, 60)
        assert proxy.patience_s == ([600.0, 0] if is_told_again else [600.0])


@pytest.mark.parametrize(
    ("files", "most"), [(None, 500), (10_000, 500), (SPARE_FILES + 100, 50), (SPARE_FILES, 1), (1, 1)]
)
def test_there_are_files_for_as_many_clients_as_may_come(files: int | None, most: int) -> None:
    limits = http_limits(DoorConfig(max_connections=500, max_connections_per_client=7, max_head_kib=3), files)
    assert (limits.max_connections, limits.max_connections_per_client, limits.max_head_bytes) == (most, 7, 3072)


def test_the_router_dies_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    launcher = (
        "import os, subprocess, sys, time\n"
        f"env = {{**os.environ, {PARENT_PID_ENV!r}: str(os.getpid())}}\n"
        "p = subprocess.Popen([sys.executable, '-m', 'pilotlight.edge_router', sys.argv[1]], env=env, stderr=subprocess.PIPE)\n"
        "p.stderr.readline()\nprint(p.pid, flush=True)\ntime.sleep(60)\n"
    )
    file = network_file(tmp_path, "http://127.0.0.1:9")
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher, str(file)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    until(lambda: not _is_running(pid), f"process {pid} has ended with its parent")


def test_the_routers_log_has_the_time_of_each_line(tmp_path: Path) -> None:
    file = network_file(tmp_path, "http://127.0.0.1:1")
    with subprocess.Popen(
        [sys.executable, "-m", "pilotlight.edge_router", str(file)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as router:  # fmt: skip
        assert router.stderr is not None
        line = router.stderr.readline()
        router.kill()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z router INFO listening on http://", line)


@pytest.mark.parametrize("wants_lines", [True, False])
async def test_the_router_logs_a_line_for_each_request_where_its_file_says_so(
    tmp_path: Path, wants_lines: bool
) -> None:
    table = f'[telemetry]\nlog_format = "json"\naccess_log = {str(wants_lines).lower()}\n'
    async with (
        sites("ams1") as fakes,
        aiohttp.ClientSession() as session,
        process(network_file(tmp_path, fakes[0].url, extra=table)) as (running, line),
    ):
        url = line.partition('"')[0]
        await ready(session, url)
        async with session.post(
            url + "/v1/chat/completions?key=secret", json={"model": "ember", "messages": []}
        ) as response:
            body = await response.read()
        async with session.get(url + "/deployments"):  # as each site does all the time
            pass
        running.terminate()
        assert running.stderr is not None
        lines = [json.loads(each) for each in (await running.stderr.read()).splitlines()]
    accesses = [each for each in lines if each["logger"] == "pilotlight.access"]
    if not wants_lines:
        assert not accesses
        return
    (access,) = accesses  # probes and polls are not logged
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/chat/completions", response.status)
    assert (access["bytes"], access["client"]) == (len(body), "127.0.0.1")
    assert access["request_id"] == response.headers["x-request-id"]


def test_a_port_in_use_is_one_sentence_with_its_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = refused_start(network_file(tmp_path, "http://127.0.0.1:9", port))
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "listen.port" in result.stderr


def test_a_misspelt_key_stops_the_start_and_names_the_nearest(tmp_path: Path) -> None:
    result = refused_start(network_file(tmp_path, "http://127.0.0.1:9", extra="helth = 1"))
    assert result.returncode == 1
    assert "did you mean 'health'" in result.stderr


def test_the_router_process_never_imports_torch_or_the_engine() -> None:
    heavy = ("torch", "pilotlight.engine", "pilotlight.runtime", "transformers", "ray")
    code = f"import sys, pilotlight.edge_router.serve; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert result.stdout.strip() == "[]"


def _is_running(pid: int) -> bool:
    """Tell whether a process runs. A zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_hangup_takes_sites_in_and_lets_those_go_that_have_left_without_cutting_a_stream(
    tmp_path: Path,
) -> None:
    place = '{ city = "Amsterdam", latitude = 52.31, longitude = 4.76 }'
    limits = RouterLimits(forget_every_s=0.05)
    async with sites("ams1", "iad1") as fakes, router(fakes[:1], limits=limits) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        async with running.chat() as response:
            assert await response.content.readany() == event(0)
            file = network_file(tmp_path, fakes[1].url)
            file.write_text(file.read_text().replace('"ams1"', '"iad1"'))
            running.edge.set_sites(load_network(file))
            await running.until(lambda: running.edge.backends["iad1"].state == "healthy")
            async with running.chat() as other:
                await other.read()
            assert [len(each.bodies) for each in fakes] == [1, 1]
            assert "ams1" in running.edge.backends
            fakes[0].go_on.set()
            assert await response.content.read() == event(99) + DONE
        await running.until(lambda: [*running.edge.backends] == ["iad1"])
        more = f'[[sites]]\nname = "ams1"\nurl = "{fakes[0].url}"\nplace = {place}\n'
        file.write_text(file.read_text() + more)
        running.edge.set_sites(load_network(file))
        await running.until(lambda: running.edge.backends["ams1"].state == "healthy")
