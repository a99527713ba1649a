"""Real engines and files: weights in host memory survive the engine host, and the runtime when it is killed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.runtime.hosts.tier_directory import LOCKS, TierDirectory
from pilotlight.support.directory_locks import remove_if_dead
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process
from tests.waiting import until

pytestmark = pytest.mark.process

NAMES = ("a", "b")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a site file with two models, of which one fits at a time."""
    for seed, name in enumerate(NAMES):
        write_llama(tmp_path / name, seed=seed)
        write_tokenizer(tmp_path / name)
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    models = "".join(
        f'[[models]]\nname = "{name}"\nsource = "{tmp_path}/{name}"\nresidency = "auto"\n' for name in NAMES
    )
    path = tmp_path / "site.toml"
    path.write_text(
        f'name = "w{abs(hash(str(tmp_path))) % 10**8}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nstandby = false\nweights_host_gib = 0.1\n'
        f"weights_gib = {1.5 * size / 2**30}\n{models}"
    )
    return path


def ask(client: httpx.Client, model: str) -> str:
    body: dict[str, Any] = {"model": model, "prompt": list(range(3, 20)), "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True}, timeout=60).raise_for_status().json()
    return str(answer["choices"][0]["text"])


def statuses(client: httpx.Client) -> dict[str, Any]:
    return {model["name"]: model for model in client.get("/status").json()["models"]}


def wakes(client: httpx.Client, model: str) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("pilotlight_wake_ms_count")]
    mine = [line for line in lines if f'model_name="{model}"' in line]
    return {line.split('clock="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in mine}


def test_weights_outlive_sleep_the_engine_host_and_a_killed_runtime(file: Path, tmp_path: Path) -> None:
    site = Process(file, tmp_path / "log")
    directory = TierDirectory(next(iter(file.read_text().split('"')[1:])), kind="weights").directory
    try:
        with httpx.Client(base_url=site.url) as client:
            first = {name: ask(client, name) for name in NAMES}
            assert first["a"] != first["b"], "they have different weights"
            assert {name: status["residency"] for name, status in statuses(client).items()} == {
                "a": "host",
                "b": "device",
            }
            assert len(list(directory.glob("*.weights"))) == 2
            assert [ask(client, name) for name in ("a", "b", "a")] == [first["a"], first["b"], first["a"]]
            assert wakes(client, "a")["swap"] == 2
            spans = client.get("/timeline").json()["spans"]
            assert any(span["what"] == "a" and span["name"] == "weights" for span in spans)
            engine = site.engine()
            engine.kill()
            until(lambda: any(p["role"] == "engine" and p["pid"] != engine.pid for p in processes(client)))
            assert ask(client, "b") == first["b"]
            assert statuses(client)["a"]["residency"] == "host"
        site.popen.kill()
        site.popen.wait()
        assert len(list(directory.glob("*.weights"))) == 2, "no process was left to remove them"
        site = Process(file, tmp_path / "log2")
        with httpx.Client(base_url=site.url) as client:
            assert "adopted" in site.log.read_text()
            assert statuses(client)["a"]["residency"] == "host"
            assert ask(client, "a") == first["a"]
            assert wakes(client, "a") == {"host": 1.0}, "not a byte of the checkpoint was read"
        assert site.stop() == 0
        assert not directory.exists()
    finally:
        if site.popen.poll() is None:
            site.popen.kill()
            site.popen.wait()
        remove_if_dead(directory, LOCKS, "tier")


def processes(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/status").json()["processes"]
    return found


def test_two_runtimes_of_one_name_are_distinguished(file: Path, tmp_path: Path) -> None:
    site = Process(file, tmp_path / "log")
    try:
        command = [sys.executable, "-m", "pilotlight.runtime", str(file)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "another process serves a site of this name" in second.stderr
        assert "choose another name" in second.stderr
    finally:
        site.popen.kill()
        site.popen.wait()
