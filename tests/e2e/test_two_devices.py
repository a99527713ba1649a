"""A site with two engine hosts on the CPU, each with half of the cores.

A burst of requests wakes Ember on the second host, which maps the weights of the first. A host dies under load, and no client notices. When requests
stop, both hosts put the model to sleep.
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.runtime.test_real_engine import Process
from tests.waiting import until

CHAT = "/ai/v1/chat/completions"
PLACES = ("Lisbon", "Oslo", "Madrid", "Tokyo", "Paris", "Rome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("two")
    file = directory / "site.toml"
    file.write_text(
        f'name = "two{abs(hash(str(directory))) % 10**8}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n[listen]\nport = 0\n'
        '[engine]\ndevices = ["cpu", "cpu"]\nkv_gib = 0.05\nmax_num_seqs = 2\nstandby = false\nweights_host_gib = 0.2\n'
        "scale_up_wait_s = 0.2\nscale_down_after_s = 2.0\n"
        '[[models]]\nname = "ember"\nsource = "embedded:ember"\nresidency = "auto"\nsleep_after_s = 2.0\n'
    )
    process = Process(file, directory / "log")
    yield process
    process.popen.kill()
    process.popen.wait()


class Crowd:
    """Clients that each send one request after another, and record the answers."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answers: dict[str, set[str]] = {place: set() for place in PLACES}
        self.num_answers = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(size)]

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request did not end"

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                number += 1
                place = PLACES[number % len(PLACES)]
                text, failure = one_answer(client, place)
                with self._lock:
                    self.num_answers += 1
                    self.answers[place].add(text)
                    if failure:
                        self.failures.append(failure)


def one_answer(client: httpx.Client, place: str) -> tuple[str, str]:
    """Return the text of the answer, and its error or ""."""
    messages = [{"role": "user", "content": f"What is the airport code of {place}?"}]
    body = {
        "model": "ember",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        with client.stream("POST", CHAT, json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as error:
        return "", repr(error)
    chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    if answer.status_code != 200 or any("error" in chunk for chunk in chunks) or lines[-1] != "data: [DONE]":
        return "", f"{answer.status_code} {lines[-2:]}"
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks), ""


def status(site: Process) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(site.url + "/status").json()
    return found


def engines(site: Process) -> list[int]:
    return [process["pid"] for process in status(site)["processes"] if process["role"] == "engine"]


def copies(site: Process) -> int:
    return int(status(site)["models"][0]["copies"])


def metric(site: Process, line: str) -> float:
    found = [text for text in httpx.get(site.url + "/metrics").text.splitlines() if text.startswith(line)]
    return sum(float(text.rpartition(" ")[2]) for text in found)


def mapped_weights(pid: int) -> set[tuple[str, str]]:
    """Return inode and path of each weights file that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {(fields[4], fields[5]) for line in lines if len(fields := line.split()) > 5 and ".weights" in fields[5]}


def lose_one(site: Process, crowd: Crowd, end: str) -> None:
    victim, before = engines(site)[0], crowd.num_answers
    getattr(psutil.Process(victim), end)()
    until(lambda: crowd.num_answers > before + 10, f"answers after {end}")
    until(lambda: len(engines(site)) == 2 and victim not in engines(site), "a new host")
    until(lambda: copies(site) == 2, "the second copy again")


def test_a_burst_wakes_a_second_copy_and_a_death_under_load_loses_no_answer(site: Process) -> None:
    with httpx.Client(base_url=site.url, timeout=60) as client:
        alone = {place: one_answer(client, place) for place in PLACES}
    assert all(text and not failure for text, failure in alone.values())
    assert copies(site) == 1
    with Crowd(site.url, 10) as crowd:
        until(lambda: copies(site) == 2, "a second copy under load")
        for index in ("0", "1"):
            line = f'vllm:prefix_cache_queries_total{{engine="{index}"'
            until(lambda line=line: metric(site, line) > 0, f"answers of device {index}")
        assert metric(site, 'pilotlight_wake_ms_count{clock="sibling"') == 1, "its weights were mapped, not read"
        assert metric(site, 'pilotlight_wake_phase_ms_count{clock="sibling",phase="weights"}') == 1
        first, second = engines(site)
        assert mapped_weights(first) == mapped_weights(second) != set(), "both hosts must map the same file"
        assert psutil.Process(first).cpu_affinity() != psutil.Process(second).cpu_affinity() or psutil.cpu_count() == 1
        for number, end in enumerate(("kill", "terminate"), 1):
            lose_one(site, crowd, end)
            assert metric(site, "pilotlight_engine_restarts") == number
    assert crowd.failures == []
    assert crowd.answers == {place: {text} for place, (text, _) in alone.items()}, "answers are the same on both hosts"
    assert metric(site, 'pilotlight_cut_sequences_total{model_name="ember",outcome="continued"}') > 0
    assert metric(site, 'pilotlight_cut_sequences_total{model_name="ember",outcome="failed"}') == 0
    until(lambda: copies(site) == 0, "requests have stopped")
    assert status(site)["models"][0]["residency"] == "host"
    assert status(site)["ready"]
    with httpx.Client(base_url=site.url, timeout=60) as client:
        assert one_answer(client, "Lisbon") == alone["Lisbon"]
    assert site.stop() == 0
