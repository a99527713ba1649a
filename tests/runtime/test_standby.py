"""The standby host: prepared while idle, used when the serving host dies, replaced with back-off, stopped with its site."""

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.runtime.hosts.memory import available_bytes
from pilotlight.runtime.hosts.standby import HOST_BYTES, SHARE, Standby
from tests.asgi import call, eventually, start
from tests.checkpoints import write_llama, write_tokenizer
from tests.fakes import FakeEngineClient, FakeLauncher
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_continuation import TEXT, Mortal
from tests.runtime.test_real_engine import HELLO as ASK
from tests.runtime.test_real_engine import Process, is_gone
from tests.waiting import until

CHAT = "/ai/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
KEPT = {"standby": True, "standby_after_s": 0.0}


def is_ready(site: Site) -> bool:
    return site.app.site.fleet.standbys[0].state == "ready"


async def test_a_dead_host_is_followed_by_the_standby_and_another_is_prepared(make_site: SiteMaker) -> None:
    async with make_site(engine=KEPT) as site:
        await eventually(lambda: is_ready(site))
        (waiting,) = site.launcher.standbys
        site.launcher.hosts[0].die()
        await eventually(lambda: site.app.site.fleet.hosts[0].client is waiting.client)
        await eventually(lambda: not site.app.site.why_not_ready())
        assert waiting.client.loaded == ["tiny"]
        assert len(site.launcher.hosts) == 1, "none was started meanwhile"
        assert (await call(site.app, CHAT, HELLO)).status == 200
        await eventually(lambda: len(site.launcher.standbys) == 2 and is_ready(site))
        text = (await call(site.app, "/metrics")).body.decode()
        assert "pilotlight_engine_standbys_taken 1.0" in text
        assert "pilotlight_engine_standby_ready 1.0" in text
        roles = [process["role"] for process in (await call(site.app, "/status")).json["processes"]]
        assert roles == ["site", "engine", "standby"]
    assert all(host.is_stopped for host in (*site.launcher.hosts, *site.launcher.standbys))


async def test_every_standby_makes_ready_for_models_whose_weights_outlive_their_host() -> None:
    asleep, private = (
        ModelSpec(name, "/models", weights_file=file) for name, file in (("a", "/memory/a"), ("b", None))
    )
    launcher = FakeLauncher()
    standby = Standby(partial(launcher.launch, standby=True), True, lambda: 0.0, quiet_s=0.0, prepare_within_s=5.0)
    standby.expect(asleep)
    standby.expect(private)
    running = asyncio.create_task(standby.run())
    try:
        await eventually(lambda: launcher.standbys and launcher.standbys[0].client.prewarmed == [asleep])
        standby.expect(other := ModelSpec("a", "/models", weights_file="/memory/a", dtype="bfloat16"))
        await eventually(lambda: launcher.standbys[0].client.prewarmed == [asleep, other])
        assert standby.take() is launcher.standbys[0]
        await eventually(lambda: len(launcher.standbys) == 2 and launcher.standbys[1].client.prewarmed == [other])
        assert launcher.standbys[0].client.prewarmed == [asleep, other], "it is told once"
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_loaded_model_is_expected_by_the_standby(make_site: SiteMaker, tmp_path: Path) -> None:
    name = f"s{abs(hash(str(tmp_path))) % 10**8}"  # the directory of weights in shared memory has it
    async with make_site(name=name, engine={**KEPT, "weights_host_gib": 1e-5}) as site:
        await eventually(lambda: is_ready(site))
        await eventually(lambda: site.launcher.standbys[0].client.prewarmed == [site.launcher.client.specs["tiny"]])


async def test_a_stream_continues_with_the_standby(make_site: SiteMaker) -> None:
    mortal = Mortal(None, 5)  # the first host that dies is the standby, once it serves
    async with make_site(launcher=mortal.launcher, engine=KEPT) as site:
        await eventually(lambda: is_ready(site))
        mortal.launcher.hosts[0].die()
        await eventually(lambda: len(mortal.launcher.standbys) == 2 and is_ready(site))

        async def die() -> None:
            mortal.launcher.standbys[0].die()

        mortal.clients[1].answer = lambda submit: mortal.outputs(submit, 5, 1, die)
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert site.app.site.fleet.hosts[0].client is mortal.launcher.standbys[1].client
        await site.is_idle()


async def test_a_standby_that_is_not_ready_is_not_taken(make_site: SiteMaker) -> None:
    gate = asyncio.Event()
    gates = [None, gate]  # for the serving host and the standby; further hosts have none

    def prepare(client: FakeEngineClient) -> None:
        client.hello_gate = gates.pop(0) if gates else None

    async with make_site(launcher=FakeLauncher(prepare), engine=KEPT) as site:
        await eventually(lambda: site.launcher.standbys)
        site.launcher.hosts[0].die()
        await eventually(lambda: len(site.launcher.hosts) == 2)
        gate.set()
        await eventually(lambda: is_ready(site))


@pytest.mark.long
async def test_a_busy_site_prepares_none(make_site: SiteMaker) -> None:
    async with make_site(engine={"standby": True, "standby_after_s": 0.2}) as site:
        site.engine.script = [30]
        exchange = start(site.app, CHAT, HELLO)
        await eventually(lambda: site.engine.open)
        await asyncio.sleep(0.4)
        assert site.launcher.standbys == []
        exchange.disconnect()
        await eventually(lambda: is_ready(site))


async def test_a_standby_that_dies_is_replaced_after_longer_and_longer_pauses(caplog: pytest.LogCaptureFixture) -> None:
    launcher = FakeLauncher()
    launcher.failures = [OSError("no more processes")] * 2
    standby = Standby(
        partial(launcher.launch, standby=True), True, lambda: 0.0, quiet_s=0.0, prepare_within_s=5.0, first_pause_s=0.01
    )
    caplog.set_level(logging.WARNING)
    task = asyncio.create_task(standby.run())
    await eventually(lambda: standby.state == "ready")
    assert caplog.text.count("the standby engine host is lost") == 2
    launcher.standbys[0].die("it was killed")
    assert standby.take() is None, "a dead one is of no use"
    await eventually(lambda: len(launcher.standbys) == 2 and standby.state == "ready")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert launcher.standbys[1].is_stopped
    pauses = [record.getMessage().rpartition("in ")[2] for record in caplog.records]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s"]


async def test_none_is_kept_where_memory_is_short_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for wanted, launches in ((None, 0), (False, 0), (True, 1)):
        launcher = FakeLauncher()
        standby = Standby(
            partial(launcher.launch, standby=True), wanted, lambda: 0.0, quiet_s=0.0, prepare_within_s=5.0,
            available=lambda: SHARE * HOST_BYTES - 1,
        )  # fmt: skip
        task = asyncio.create_task(standby.run())
        if launches:
            await eventually(lambda s=standby: s.state == "ready")
        else:
            await eventually(
                lambda w=wanted, task=task: task.done() or (w is None and "memory are available" in caplog.text)
            )
        assert len(launcher.standbys) == launches
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "1.25 GiB of memory are available, but one needs 8 x 0.156 GiB = 1.25 GiB" in caplog.text


def test_a_container_may_have_less_memory_than_its_machine(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:   1000 kB\nHugePages_Total:       0\n")
    assert available_bytes(tmp_path, tmp_path) == 1000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700000\n")
    assert available_bytes(tmp_path, tmp_path) == 1000 << 10
    (tmp_path / "memory.max").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 300000\n")
    assert available_bytes(tmp_path, tmp_path) == 500000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.process
def test_a_real_standby_takes_over_and_dies_with_its_site(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "site.toml"
    file.write_text(
        'name = "sb1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nstandby = true\nstandby_after_s = 0.0\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\n'
    )
    process = Process(file, tmp_path / "log")
    try:
        with httpx.Client(base_url=process.url, timeout=30) as client:
            first = client.post(CHAT, json=ASK).json()
            waiting = standby_of(process)
            process.engine().kill()
            until(lambda: client.get("/readyz").status_code == 200 and pids(process, "engine") == [waiting.pid])
            assert client.post(CHAT, json=ASK).json()["choices"] == first["choices"]
            last = [standby_of(process), process.engine()]
        process.popen.kill()
        process.popen.wait()
        until(lambda: all(map(is_gone, last)))
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


def pids(process: Process, role: str) -> list[int]:
    status = httpx.get(process.url + "/status").json()
    return [found["pid"] for found in status["processes"] if found["role"] == role]


def standby_of(process: Process) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [psutil.Process(pid) for pid in pids(process, "standby")]
        return bool(found) and not is_gone(found[0])

    deadline = time.monotonic() + 100  # a standby is prepared at low priority, and the machine may be busy
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]
