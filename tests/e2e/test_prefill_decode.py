"""A site with a prefill host and a decode host gives the same texts as one host. If either host is killed, stopped or frozen at any moment, no token
is lost, repeated or changed, and no resource leaks.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.runtime.test_real_engine import Process
from tests.waiting import until

CHAT = "/ai/v1/chat/completions"
ROLES = ("prefill", "decode")


def write_site(directory: Path, roles: tuple[str, ...], ranks_that_decode: int = 1) -> Path:
    several = f"devices = {['cpu'] * ranks_that_decode}" if ranks_that_decode > 1 else 'device = "cpu"'
    devices = {"prefill": 'device = "cpu"', "decode": several}
    hosts = "".join(f'[[engine.hosts]]\n{devices[role]}\nrole = "{role}"\n' for role in roles)
    file = directory / f"{'-'.join(roles)}.toml"
    file.write_text(
        f'name = "pd{abs(hash(str(directory))) % 10**8}{len(roles)}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n'
        "[listen]\nport = 0\n[engine]\nkv_gib = 0.1\nkv_host_gib = 0.1\nstandby = false\nweights_host_gib = 0.2\n"
        f"step_deadline_s = 2.0\nmax_num_batched_tokens = 128\nscale_up_wait_s = 0\n{hosts}"
        '[[models]]\nname = "ember"\nsource = "embedded:ember"\n[limits]\ncontinue_within_s = 60\n'
    )
    return file


class Split:
    """A site with two hosts, its status, and requests to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = process.url

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.url + "/status", timeout=30).json()
        return found

    def pids(self) -> list[int]:
        return [process["pid"] for process in self.status()["processes"] if process["role"] == "engine"]

    def metric(self, start: str) -> float:
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def is_whole(self) -> bool:
        return len(self.pids()) == 2 and self.status()["models"][0]["copies"] == 2

    def ask(self, prompt: str, **more: Any) -> tuple[str, dict[str, Any], str]:
        """Return the text of a stream, its usage, and the route header, which names the host that computed the prompt."""
        body = {
            "model": "ember", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        with httpx.stream("POST", self.url + CHAT, json=body | more, timeout=120) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert answer.status_code == 200, lines
        assert lines[-1] == "data: [DONE]", lines
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert not any("error" in chunk for chunk in chunks), chunks
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        return text, chunks[-1]["usage"], answer.headers.get("x-pilotlight-route", "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    directory = tmp_path_factory.mktemp("split")
    process = Process(write_site(directory, ROLES), directory / "log")
    made = Split(process)
    until(made.is_whole, "the model on both hosts")
    yield made
    process.popen.kill()
    process.popen.wait()


def prompt(number: int, words: int = 120) -> str:
    draw = random.Random(number)
    return " ".join(
        draw.choice(("pilot", "light", "stove", "warm", "blue", "flame")) + str(number) for _ in range(words)
    )


class Streams:
    """Keep other streams open, so that it pays to compute prompts at the other host."""

    def __init__(self, site: Split, number: int = 4) -> None:
        self._site, self._number = site, number
        self._pool = ThreadPoolExecutor(number)
        self._stop = threading.Event()

    def __enter__(self) -> "Streams":
        self._futures = [self._pool.submit(self._run, i) for i in range(self._number)]
        time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for future in self._futures:
            future.result(120)
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self._site.ask(f"Count, {number}.", max_tokens=120)


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 7}


def assert_nothing_is_open(site: Split) -> None:
    until(lambda: site.metric("pilotlight_inflight_requests") == 0, "every request has ended")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        until(lambda name=name: site.metric(name + "{") == 0, f"{name} is zero")


def test_prompts_go_to_the_other_host_and_texts_stay_the_same(site: Split) -> None:
    check_texts(site)


@pytest.mark.slow
def test_two_ranks_continue_with_the_blocks_of_one(tmp_path: Path) -> None:
    process = Process(write_site(tmp_path, ROLES, ranks_that_decode=2), tmp_path / "log")
    try:
        site = Split(process)
        until(site.is_whole, "the model on both hosts")
        check_texts(site)
    finally:
        process.popen.kill()
        process.popen.wait()


def check_texts(site: Split) -> None:
    expected = {i: [site.ask(prompt(i), **more)[0] for more in ({}, SAMPLED)] for i in range(3)}
    assert site.metric("pilotlight_kv_peer_hits_total") == 0, "an idle host computes its own prompts"
    placed = 'pilotlight_prompts_placed_total{model_name="ember",where="handed_over"}'
    with Streams(site):
        for i in range(3):  # as different users, so that nothing is cached
            for more, text in zip(({}, SAMPLED), expected[i], strict=True):
                said, usage, route = site.ask(prompt(i), **more, user=f"u{i}")
                assert said == text
                assert usage["completion_tokens"] == 24
        before = site.metric(placed)
        fresh, usage, route = site.ask(prompt(77))
        assert site.metric(placed) == before + 1
        assert route.startswith("prompt=engine 0; here="), route
        assert usage["prompt_tokens_details"]["cached_tokens"] < 64, (
            "the prompt must be computed for this request, at the other host"
        )
    assert site.metric("pilotlight_kv_peer_hits_total") > 200
    assert site.ask(prompt(77))[0] == fresh
    assert_nothing_is_open(site)


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        (signal.SIGSTOP, "prefill"),
        (signal.SIGKILL, "decode"),
        pytest.param(signal.SIGKILL, "prefill", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "decode", marks=pytest.mark.slow),
    ],
)
def test_neither_hosts_death_costs_a_token(site: Split, victim: str, how: signal.Signals) -> None:
    draw = random.Random(f"{victim}{how}")
    numbers = [draw.randrange(10**6) for _ in range(4)]
    until(site.is_whole, "both hosts")
    with Streams(site, 3), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(site.ask, prompt(number)) for number in numbers]
        time.sleep(draw.uniform(0.05, 0.6))
        pid = site.pids()[ROLES.index(victim)]
        psutil.Process(pid).send_signal(how)
        texts = [answer.result(120)[0] for answer in answers]
    until(lambda: site.is_whole() and pid not in site.pids(), "a new host in its place", 120)
    for number, text in zip(numbers, texts, strict=True):
        assert site.ask(prompt(number))[0] == text
    assert_nothing_is_open(site)


def test_it_ends_in_order(site: Split) -> None:
    assert site.process.stop() == 0
