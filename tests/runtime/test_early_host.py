"""The engine host that is started before its site: it becomes an ordinary host, or leaves nothing behind."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from runtime.engines.early_host import start_early
from runtime.engines.launch import launchers_of
from sites.config import EngineConfig
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process, eventually

ENGINE = EngineConfig(device="cpu", threads=1, kv_gib=0.01)


def test_the_first_host_is_the_one_that_was_started_early_and_the_next_is_not(tmp_path: Path) -> None:
    early = start_early(tmp_path / "none.toml")
    assert early is not None

    async def launch_two() -> list[int | None]:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        pids = []
        for _ in range(2):
            host = await launcher.launch()
            await host.client.hello()
            pids.append(host.pid)
            await host.stop(grace_s=5.0)
            assert await host.exited()
        launcher.close()
        return pids

    first, second = asyncio.run(launch_two())
    assert first == early.pid
    assert second != first


def test_one_that_died_is_replaced_without_a_word_to_the_client(tmp_path: Path) -> None:
    early = start_early(tmp_path / "none.toml")
    assert early is not None
    early.kill()
    asyncio.run(early.wait())

    async def launch() -> int | None:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        host = await launcher.launch()
        await host.client.hello()
        await host.stop(grace_s=5.0)
        launcher.close()
        return host.pid

    assert asyncio.run(launch()) != early.pid


def test_a_site_that_refuses_to_start_leaves_no_host_behind(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('name = "x"\nplaec = 1\n')
    site = subprocess.Popen([sys.executable, "-m", "runtime", str(file)], stderr=subprocess.PIPE)
    children: list[psutil.Process] = []
    while site.poll() is None and not children:
        children = psutil.Process(site.pid).children()
    _, said = site.communicate(timeout=30)
    assert site.returncode == 1
    assert b"plaec" in said
    assert children
    eventually(lambda: not any(child.is_running() for child in children))


def test_a_site_serves_with_the_threads_that_its_file_names(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "site.toml"
    file.write_text(
        'name = "early"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nweights_host_gib = 0\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\n'
    )
    site = Process(file, tmp_path / "log")
    try:
        body = {"model": "tiny", "prompt": "warm", "max_tokens": 2}
        assert httpx.post(site.url + "/v1/completions", json=body, timeout=30).status_code == 200
        engine = site.engine()
        assert "--early" in engine.cmdline()
        assert engine.environ()["OMP_NUM_THREADS"] == "1"
    finally:
        assert site.stop() == 0
    eventually(lambda: not engine.is_running())
