"""Thirteen real models on a device with room for a quarter of them: each answers with its own weights, however often it has slept."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.scenarios.overcommit import zipf_arrivals
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process

NAMES = [f"m{i:02}" for i in range(13)]


@pytest.mark.process
def test_thirteen_models_share_the_room_of_three(tmp_path: Path) -> None:
    for seed, name in enumerate(NAMES):
        write_llama(tmp_path / name, seed=seed)
        write_tokenizer(tmp_path / name)
    size = (tmp_path / NAMES[0] / "model.safetensors").stat().st_size
    entries = [f'[[models]]\nname = "{name}"\nsource = "{tmp_path}/{name}"\nresidency = "auto"\n' for name in NAMES]
    file = tmp_path / "site.toml"
    file.write_text(
        f'name = "o{abs(hash(str(tmp_path))) % 10**8}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.02\nstandby = false\nweights_host_gib = 0.1\n'
        f"weights_gib = {13 / 4 * size / 2**30}\n" + "".join(entries)
    )
    site = Process(file, tmp_path / "log")
    try:
        with httpx.Client(base_url=site.url, timeout=60) as client:

            def ask(name: str) -> tuple[str, str]:
                body: dict[str, Any] = {"model": name, "prompt": list(range(3, 20)), "max_tokens": 8, "temperature": 0}
                answer = client.post("/v1/completions", json={**body, "ignore_eos": True}).raise_for_status().json()
                return name, answer["choices"][0]["text"]

            alone = dict(map(ask, NAMES))
            assert len(set(alone.values())) == len(NAMES), "they have different weights"
            wanted = [arrival.model for arrival in zipf_arrivals(NAMES, 80, 1.0, seed=5)]
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(ask, wanted))
            assert all(alone[name] == text for name, text in answers)
            models = client.get("/status").json()["models"]
            assert sum(model["residency"] == "device" for model in models) <= 3
            assert {model["residency"] for model in models} == {"device", "host"}
            assert sum(model["wakes"] for model in models) > len(NAMES) + 5
        assert site.stop() == 0
    finally:
        if site.popen.poll() is None:
            site.popen.kill()
            site.popen.wait()


def test_zipf_draws_the_first_most_often_and_the_same_again() -> None:
    drawn = [arrival.model for arrival in zipf_arrivals(NAMES, 2000, 1.0, seed=random.Random(1).randint(0, 99))]
    assert drawn == [arrival.model for arrival in zipf_arrivals(NAMES, 2000, 1.0, seed=random.Random(1).randint(0, 99))]
    counts = [drawn.count(name) for name in NAMES]
    assert counts[0] > 1.5 * counts[1] > counts[-1] > 0
