"""The start of an engine host's process: its threads and environment, and its end with a site that refuses to start."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.runtime.hosts.launch import host_environment, launchers_of
from pilotlight.sites.site import EngineConfig
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process
from tests.waiting import until

pytestmark = pytest.mark.process

ENGINE = EngineConfig(device="cpu", threads=1, kv_gib=0.01)


def test_one_that_is_killed_before_it_has_answered_is_replaced(tmp_path: Path) -> None:
    write_llama(tmp_path)

    async def launch() -> int:
        (launcher,) = launchers_of(ENGINE, "launch-test")
        first = await launcher.launch()
        assert first.pid is not None
        psutil.Process(first.pid).kill()
        assert "SIGKILL" in await first.exited()
        assert (first.was_killed, first.ended_by_itself) == (True, False)
        await first.stop(grace_s=0.0)
        second = await launcher.launch()
        info = await second.client.load_model(ModelSpec("tiny", str(tmp_path)))
        await second.stop(grace_s=5.0)
        launcher.close()
        return info.vocab_size

    assert asyncio.run(launch()) > 0


def test_a_site_that_refuses_to_start_leaves_no_host_behind(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('name = "x"\nplaec = 1\n')
    site = subprocess.Popen([sys.executable, "-m", "pilotlight.runtime", str(file)], stderr=subprocess.PIPE)
    children: list[psutil.Process] = []
    while site.poll() is None:
        children += psutil.Process(site.pid).children()
    _, said = site.communicate(timeout=60)
    assert site.returncode == 1
    assert b"plaec" in said
    assert not any(child.is_running() for child in children)


def test_a_host_computes_with_the_threads_that_the_sites_file_names_and_ends_with_its_site(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "site.toml"
    file.write_text(
        'name = "launch"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nweights_host_gib = 0\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\n'
    )
    site = Process(file, tmp_path / "log")
    try:
        body = {"model": "tiny", "prompt": "warm", "max_tokens": 2}
        assert httpx.post(site.url + "/v1/completions", json=body, timeout=30).status_code == 200
        engine = site.engine()
        assert '"threads":1' in "".join(engine.cmdline())
    finally:
        assert site.stop() == 0
    until(lambda: not engine.is_running())


def test_a_host_takes_its_threads_before_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import os, sys, pilotlight.engine.host.engine_host as host\n"
        "def run(self):\n"
        "    assert 'torch' not in sys.modules\n"
        "    import torch\n"
        "    print(torch.get_num_threads(), flush=True)\n"
        "host.EngineHost.run = run\n"
        f"host.main(['--address', 'ipc://{tmp_path}/engine', '--config', '{{\"threads\": 1}}'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_an_engine_host_inherits_nothing_that_signs_or_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "PILOTLIGHT_HOP_SECRET",
        "PILOTLIGHT_DEPLOY_TOKEN",
        "PILOTLIGHT_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
    )
    for name in (*secrets, "PILOTLIGHT_CPU", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "something")
    inherited = host_environment()
    assert not inherited.keys() & set(secrets)
    assert inherited.keys() >= {"PILOTLIGHT_CPU", "TOKENIZERS_PARALLELISM", "PATH"}
