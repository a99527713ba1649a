"""A site in its own process, with a real engine host and a tiny random checkpoint: start, answer, survive, drain, clean up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import write_llama, write_tokenizer
from tests.waiting import until

pytestmark = pytest.mark.process

CHAT = "/ai/v1/chat/completions"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
    "max_tokens": 5,
}
ENDLESS = {**HELLO, "max_tokens": 200, "ignore_eos": True, "stream": True}


class Process:
    """A process with `python -m pilotlight.runtime FILE`."""

    def __init__(self, file: Path, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as sink:
            command = [sys.executable, "-m", "pilotlight.runtime", str(file)]
            self.popen = subprocess.Popen(
                command, stderr=sink, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"}
            )
        try:
            self.url = self.wait_for("ready: ").split()[0]
        except BaseException:
            self.popen.kill()
            self.popen.wait()
            raise

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + 60
        while text not in (said := self.log.read_text()):
            assert self.popen.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return said.partition(text)[2]

    def engine(self) -> psutil.Process:
        """Return the serving engine; wait until there is one."""
        deadline = time.monotonic() + 60
        while True:
            for process in httpx.get(self.url + "/status").json()["processes"]:
                if process["role"] == "engine":
                    with suppress(psutil.NoSuchProcess):  # the process has just died
                        return psutil.Process(process["pid"])
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def has_another_engine(self, than: psutil.Process) -> bool:
        """Tell whether a new engine runs. Shortly after a death there may be none."""
        processes = httpx.get(self.url + "/status").json()["processes"]
        return any(process["role"] == "engine" and process["pid"] != than.pid for process in processes)

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(60)


@pytest.fixture(scope="module")
def site_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    write_llama(directory / "tiny")
    write_tokenizer(directory / "tiny")
    file = directory / "ams1.toml"
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nstandby = false\n'
        f'[[models]]\nname = "tiny"\nsource = "{directory}/tiny"\n'
    )
    return file


@contextmanager
def running(site_file: Path, log: Path) -> Iterator[Process]:
    started = Process(site_file, log)
    yield started
    if started.popen.poll() is None:
        started.popen.kill()
        started.popen.wait()


@pytest.fixture
def process(process_tier: None, site_file: Path, tmp_path: Path) -> Iterator[Process]:
    with running(site_file, tmp_path / "log") as started:
        yield started


@pytest.fixture(scope="module")
def lasting(process_tier: None, site_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Yield a site that is shared by the tests that do not stop it."""
    with running(site_file, tmp_path_factory.mktemp("lasting") / "log") as started:
        yield started


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_signals_for_servers_that_every_process_of_a_site_gets_end_none_of_them(lasting: Process) -> None:
    with httpx.Client(base_url=lasting.url, timeout=30) as client:
        assert client.post(CHAT, json={**ENDLESS, "max_tokens": 2}).status_code == 200
        processes = [*psutil.Process(lasting.popen.pid).children(recursive=True), psutil.Process(lasting.popen.pid)]
        for process in processes:
            process.send_signal(signal.SIGUSR2)
            process.send_signal(signal.SIGHUP)
        lasting.wait_for("SIGHUP")
        assert client.post(CHAT, json={**ENDLESS, "max_tokens": 2}).status_code == 200
    assert not any(is_gone(process) for process in processes)


def test_an_engine_host_that_is_ended_on_request_costs_no_stream(lasting: Process) -> None:
    continued = 'pilotlight_cut_sequences_total{model_name="tiny",outcome="continued"} 1.0'
    with httpx.Client(base_url=lasting.url, timeout=30) as client:
        whole = client.post(CHAT, json=ENDLESS).text

        def ends_in_mid_stream() -> bool:
            """Return whether the engine was killed in the middle of the stream. After a slow signal it may have computed all of it."""
            engine = lasting.engine()
            with client.stream("POST", CHAT, json=ENDLESS) as answer:
                lines = answer.iter_lines()
                said = [next(lines)]
                engine.terminate()
                said += list(lines)
            assert [line for line in said if line][-1] == "data: [DONE]"
            assert texts(said) == texts(whole.splitlines())
            until(lambda: lasting.has_another_engine(engine))
            return continued in client.get("/metrics").text

        until(ends_in_mid_stream)


def texts(lines: list[str]) -> str:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_a_site_answers_survives_its_engine_and_leaves_nothing_behind(process: Process) -> None:
    with httpx.Client(base_url=process.url, timeout=30) as client:
        first = client.post(CHAT, json=HELLO).json()
        assert first["usage"]["completion_tokens"] == 5
        streamed = client.post(CHAT, json={**HELLO, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        engine = process.engine()
        with client.stream("POST", CHAT, json=ENDLESS) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.kill()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        until(lambda: client.get("/readyz").status_code == 200)
        again = client.post(CHAT, json=HELLO).json()
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        successor = process.engine()
        assert successor.pid != engine.pid
        with client.stream("POST", CHAT, json=ENDLESS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.popen.wait(60) == 0
    assert is_gone(successor)


def test_a_killed_site_takes_its_engine_with_it(process: Process) -> None:
    engine = process.engine()
    process.popen.kill()
    until(lambda: is_gone(engine))


def test_a_site_dies_with_the_parent_that_asks_for_it(site_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent_code = (
        "import os, subprocess, sys, time\n"
        "environment = {**os.environ, 'PILOTLIGHT_PARENT_PID': str(os.getpid())}\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'runtime', {str(site_file)!r}], env=environment,\n"
        f"                         stderr=open({str(log)!r}, 'w'))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        site = psutil.Process(int(parent.stdout.readline()))
    until(lambda: log.exists() and "listening" in log.read_text())
    parent.kill()
    parent.wait()
    until(lambda: is_gone(site))


def test_choices_share_their_prompt_and_draw_as_if_alone(lasting: Process) -> None:
    prompt = "the pilot light of a gas stove burns small and blue until somebody wants warm water " * 2  # data
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 1, "seed": 40}
    asked |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
    with httpx.Client(base_url=lasting.url, timeout=30) as client:
        together = client.post("/v1/completions", json={**asked, "n": 3}).json()
        alone = [client.post("/v1/completions", json={**asked, "seed": 40 + i}).json() for i in range(3)]
        assert [c["text"] for c in together["choices"]] == [answer["choices"][0]["text"] for answer in alone]
        assert len({c["text"] for c in together["choices"]}) == 3
        assert together["usage"]["completion_tokens"] == 36
        assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
        echoed = client.post(
            "/v1/completions", json={**asked, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
        ).json()["choices"][0]
        assert echoed["text"] == prompt
        assert "".join(echoed["logprobs"]["tokens"]) == prompt
        own = [next(iter(entry.values())) for entry in echoed["prompt_logprobs"][1:]]
        assert [entry["logprob"] for entry in own] == echoed["logprobs"]["token_logprobs"][1:]
        for entry, top in zip(own, echoed["logprobs"]["top_logprobs"][1:], strict=True):
            assert (entry["rank"] == 1) == (max(top.values()) <= entry["logprob"])
