"""Each alert is fired by what really goes wrong: processes that are killed, a database that is down, files that are damaged.

tests/deploy/alerting.py evaluates the shipped rules by what the processes published before and after that.
"""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from load_tests.local_network import free_ports
from load_tests.postgres import Postgres, running_postgres
from load_tests.site_process import SiteProcess, kill
from pilotlight.runtime.cli.network.network_folder import init
from pilotlight.sites.joining.authority import Authority, new_pair
from pilotlight.sites.key_files import new_key
from tests.checkpoints import write_tokenizer
from tests.deploy.alerting import Scrape, firing, scrape
from tests.edge_router.fakes import FakeSite, answer, sites
from tests.engine.families import write_family
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SECRET = "a secret of sixteen bytes or more"
PLACE = '{ city = "here", latitude = 0.0, longitude = 0.0 }'
OUTPUT = {
    "choices": [{"text": "x", "index": 0, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
TIERS = {"device": "cpu", "standby": False, "kv_gib": 0.03, "kv_host_gib": 0.01, "kv_disk_gib": 0.2}
# Experts in mxfp4 are computed by torch, so their steps cannot be recorded.
NOT_RECORDABLE = "gpt-oss, experts in mxfp4"

pytestmark = [
    pytest.mark.network,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)"),
]


@contextmanager
def router(folder: Path, text: str, url: str) -> Iterator[None]:
    """Run a router with this file until the scope ends."""
    file, log = folder / "network.toml", folder / "router.log"
    file.write_text(text)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PILOTLIGHT_HOP_SECRET": SECRET, "XDG_STATE_HOME": str(folder / "state"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pilotlight.edge_router", str(file)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=sink)
    try:
        until(lambda: "listening on" in log.read_text() or process.poll() is not None, "the router listens")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.kill()
        process.wait()


def value(found: Scrape, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    return sum(
        number
        for series, number in found.items()
        if series.name == name and labels.items() <= dict(series.labels).items()
    )


async def test_a_database_that_is_down_fires_the_alerts_of_what_is_kept_there(tmp_path: Path) -> None:
    try:
        with running_postgres() as postgres:
            async with sites("ams1") as [site]:
                await database_is_killed(tmp_path, postgres, site)
    except FileNotFoundError as error:
        pytest.skip(str(error))


async def database_is_killed(folder: Path, postgres: Postgres, site: FakeSite) -> None:
    (port,) = free_ports(1)
    url, (key, known) = f"http://127.0.0.1:{port}", new_key("acme", ("models",))
    text = (
        f"place = {PLACE}\nlisten = {{ port = {port} }}\ndoor = {{ max_open_per_client = 1000, max_connections_per_client = 1000 }}\n"
        f'quotas = {{ store = "{postgres.url}" }}\nresponses = {{ store = "{postgres.url}" }}\n'
        f'ledger = {{ directory = "{folder}/ledger", store = "{postgres.url}", when_failing = "serve" }}\n'
        f'[[accounts]]\nname = "acme"\ntokens_per_min = 1e9\n[[keys]]\nname = "acme"\nkey_sha256 = "{known.key_sha256}"\n'
        f'[[sites]]\nname = "ams1"\nurl = "{site.url}"\nplace = {PLACE}\n'
    )
    site.secret, site.behave = SECRET, answer(200, OUTPUT)
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=64)) as session:

        async def ask(path: str = "/v1/completions") -> None:
            async with session.post(url + path, json={"model": "ember", "prompt": "x", "input": "x"}) as response:
                await response.read()

        with router(folder, text, url):
            await ask()
            before = await asyncio.to_thread(scrape, url)
            assert firing(folder, before, before) == set()
            postgres.kill()
            await asyncio.gather(*(ask() for _ in range(4100)))
            while True:
                async with session.get(f"{url}/v1/responses/resp_{'0' * 32}") as response:
                    await response.read()
                after = await asyncio.to_thread(scrape, url)
                names = ("ledger_failing", "quotas_failing", "responses_failing")
                if all(value(after, f"pilotlight_router_{name}") for name in names):
                    break
                await asyncio.sleep(0.1)
            expected = {
                "PilotlightLedgerFailing",
                "PilotlightLedgerBehind",
                "PilotlightQuotasFailing",
                "PilotlightResponsesFailing",
            }
            assert firing(folder, before, after) == expected
            postgres.start()  # for its scope, which kills it


def post(url: str, path: str, body: dict[str, Any]) -> int:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_what_fails_at_a_site_fires_its_alerts(tmp_path: Path) -> None:
    write_family(tmp_path / "odd", NOT_RECORDABLE)
    write_tokenizer(tmp_path / "odd")
    models = [{"name": "ember", "source": "embedded:ember"}, {"name": "odd", "source": str(tmp_path / "odd")}]
    tiers = {**TIERS, "kv_disk_dir": str(tmp_path / "disk")}
    secret = {"PILOTLIGHT_HOP_SECRET": SECRET, "XDG_STATE_HOME": str(tmp_path / "state")}
    with SiteProcess("ams1", tiers, models, environment=secret) as site:
        (port,) = free_ports(1)
        url, of_site = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{site.port}"
        text = (
            f'place = {PLACE}\nlisten = {{ port = {port} }}\nledger = {{ directory = "{tmp_path}/ledger" }}\n'
            f'[[objectives]]\nmodel = "*"\nanswered = 0.99\n[[sites]]\nname = "ams1"\nurl = "{of_site}"\nplace = {PLACE}\n'
        )
        with router(tmp_path, text, url):
            story = {"model": "ember", "max_tokens": 8, "prompt": "Once upon a time"}
            serves(url, story)
            before = scrape(url, of_site)
            assert firing(tmp_path, before, before) == set()

            steps = {"model": "odd", "max_tokens": 40, "ignore_eos": True, "prompt": "Once upon a time"}
            assert post(of_site, "/v1/completions", steps) == 200
            graphs = changed(before, of_site, "pilotlight_recording_failures_total", 1)
            assert firing(tmp_path, before, graphs) == {"PilotlightGraphsFailed"}

            losses = with_damaged_blocks(site, of_site, tmp_path / "disk", graphs)
            assert "PilotlightTierDamaged" in firing(tmp_path, graphs, losses)

            for _ in range(3):
                kill_host(site)
            restarts = changed(losses, of_site, "pilotlight_engine_restarts", 3)
            assert firing(tmp_path, losses, restarts) == {"PilotlightEngineRestarts"}

            serves(url, story)
            before = scrape(url, of_site)
            with_lost_stream(url, site)
            until(
                lambda: value(scrape(url), "pilotlight_router_site_state", state="unhealthy") == 1, "the site is lost"
            )
            assert {post(url, "/v1/completions", story) for _ in range(20)} == {503}
            after: Scrape = {}

            def is_burning() -> bool:
                after.update(scrape(url, of_site))
                return value(after, "pilotlight_router_slo_burn_rate", window="1h", site="") > 14.4

            until(is_burning, "the requests are judged")
            after = scrape(url, of_site)
            assert firing(tmp_path, before, after) == {
                "PilotlightDown", "PilotlightSiteLost", "PilotlightNoSite", "PilotlightStreamsLost",
                "PilotlightBudgetBurnsFast", "PilotlightBudgetBurns",
            }  # fmt: skip


def serves(url: str, body: dict[str, Any]) -> None:
    """Wait until a router takes its site for healthy, and the site answers."""
    until(lambda: value(scrape(url), "pilotlight_router_site_state", state="healthy") == 1, "a healthy site", 120)
    until(lambda: post(url, "/v1/completions", body) == 200, "the site answers", 120)


def changed(before: Scrape, url: str, name: str, by: float) -> Scrape:
    """Wait until a metric of one process is greater by this much; return all then."""
    found: Scrape = {}

    def has_grown() -> bool:
        found.update(scrape(url))
        return value(found, name) >= value(before, name) + by

    until(has_grown, f"{name} grows", within_s=120)
    return {**before, **found}


def kill_host(site: SiteProcess) -> None:
    """Kill the site's engine host, and wait until another one serves."""
    pid = site.pid("engine")
    assert pid is not None
    kill(pid)
    site.until(lambda: site.pid("engine") not in (None, pid) and site.text("/readyz") != "", "another host serves")
    site.ask({"model": "ember", "max_tokens": 1, "prompt": "x"})


def with_damaged_blocks(site: SiteProcess, url: str, folder: Path, before: Scrape) -> Scrape:
    """Fill the tiers, damage what has reached the disk, restart the engine host, and ask again; return what is published then."""
    prompts = [{"model": "ember", "max_tokens": 1, "prompt": f"{number} " + "Hello " * 150} for number in range(60)]
    for prompt in prompts:
        site.ask(prompt)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 50, len(data), 997):
            data[at] ^= 1
        path.write_bytes(data)
    kill_host(site)
    for prompt in prompts:
        site.ask(prompt)
    return changed(before, url, "pilotlight_kv_tier_losses_total", 1)


def with_lost_stream(url: str, site: SiteProcess) -> None:
    """Kill the only site while it streams; the stream ends with an error."""
    body = {"model": "ember", "max_tokens": 2000, "ignore_eos": True, "stream": True, "prompt": "Once"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.readline().startswith(b"data: ")
        host = site.pid("engine")
        kill(site.process.pid)
        if host is not None:
            with suppress(ProcessLookupError):
                kill(host)
        assert b'"error"' in response.read()


@pytest.mark.parametrize(("days", "expected"), [(398, set()), (13, {"PilotlightCertificateEnds"})])
def test_a_certificate_close_to_its_end_fires_its_alert(days: float, expected: set[str], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    init(tmp_path, "127.0.0.1", port, ("here", 0.0, 0.0), 5)
    pair = new_pair("127.0.0.1")
    (tmp_path / "router.key").write_bytes(pair.key)
    (tmp_path / "router.pem").write_bytes(Authority(tmp_path).issue(pair.request, "127.0.0.1", days))
    trust = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    text = (
        f'place = {PLACE}\n[listen]\nport = {port}\ntls_certificate = "{tmp_path}/router.pem"\ntls_key = "{tmp_path}/router.key"\n'
        f'[[sites]]\nname = "ams1"\nurl = "http://127.0.0.1:9"\nplace = {PLACE}\n'
    )
    with router(tmp_path, text, f"https://127.0.0.1:{port}"):
        found = scrape(f"https://127.0.0.1:{port}", trust=trust)
    assert value(found, "up") == 1
    found = {series: number for series, number in found.items() if "site_state" not in series.name}  # no site runs here
    assert firing(tmp_path, found, found) == expected
