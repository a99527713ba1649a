"""An engine host gets SIGKILL under sixteen streams: each continues to the same answer as without a kill, or ends with an error event."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pilotlight.engine.api.step_journal import read_journal
from tests.runtime.test_real_engine import Process

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 120, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def asked(content: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "model": "ember",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }


REQUESTS: list[dict[str, Any]] = [
    *(asked(f"Tell me a story about {hero}.", temperature=0, **LONG) for hero in ("a fox", "a boat", "a lamp", "snow")),
    *(asked("Tell me a story.", temperature=1.0, top_p=0.95, seed=seed, **LONG) for seed in range(5)),
    asked("Tell me a story.", temperature=0.8, seed=3, presence_penalty=0.6, repetition_penalty=1.2, **LONG),
    asked("Tell me a story about rain.", temperature=0.9, seed=8, logprobs=True, top_logprobs=2, **LONG),
    asked("Tell me a story.", temperature=1.0, seed=40, n=2, **LONG),
    asked("What is the weather in Lisbon?", temperature=0, tools=[WEATHER]),
    asked("Tell me a story about the sea.", temperature=0, stop=["e s", "qqq"], **LONG),
    asked("What is the airport code of Lisbon?", temperature=0),
    asked("Tell me a story about a tree.", temperature=1.0, seed=2**63 - 1, **LONG),
]  # fmt: skip


class Stream:
    """One streaming request, read in a separate thread."""

    def __init__(self, url: str, body: dict[str, Any], on_event: Callable[[], None] = lambda: None) -> None:
        self.events: list[Any] = []
        self.has_started = threading.Event()
        self.error: httpx.HTTPError | None = None  # the error that cut the stream, if any
        self._thread = threading.Thread(target=self._read, args=(url, body, on_event), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any], on_event: Callable[[], None]) -> None:
        try:
            self._hear(url, body, on_event)
        except httpx.HTTPError as error:
            self.error = error

    def _hear(self, url: str, body: dict[str, Any], on_event: Callable[[], None]) -> None:
        with httpx.Client(timeout=120) as client, client.stream("POST", url + CHAT, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data if data == "[DONE]" else json.loads(data))
                    self.has_started.set()
                    on_event()
                elif line.startswith("{"):
                    self.events.append(json.loads(line))

    def end(self, timeout_s: float = 100.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream hangs after {len(self.events)} events"
        assert self.error is None, f"after {len(self.events)} events: {self.error!r}"

    @property
    def answer(self) -> Any:
        """Return texts, calls, tokens and usage of the answer, independent of how it was split into events."""
        assert self.events[-1] == "[DONE]", self.events[-1]
        told: dict[int, dict[str, Any]] = {}
        usage = None
        for event in self.events[:-1]:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                mine = told.setdefault(choice["index"], {"text": "", "calls": [], "tokens": []})
                mine["text"] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", []):
                    mine["calls"] += [""] * (call["index"] + 1 - len(mine["calls"]))
                    mine["calls"][call["index"]] += call["function"].get("name", "") + call["function"]["arguments"]
                mine["tokens"] += [item["token"] for item in (choice["logprobs"] or {}).get("content", [])]
                mine["finish"] = choice["finish_reason"]
        assert usage is not None
        return told, usage["prompt_tokens"], usage["completion_tokens"]


def write_site(folder: Path, source: str, continue_within_s: float, step_deadline_s: float = 30.0) -> Path:
    file = folder / "ams1.toml"
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.05\nstandby = false\n'
        f"step_deadline_s = {step_deadline_s}\n"
        f'[limits]\ncontinue_within_s = {continue_within_s}\n[[models]]\nname = "ember"\nsource = "{source}"\n'
    )
    return file


def end(site: Process) -> None:
    if site.popen.poll() is None:
        site.popen.kill()
        site.popen.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Start a site with long time limits.

    Engine hosts start slowly on a busy machine, and these tests check answers, not times.
    """
    folder = tmp_path_factory.mktemp("site")
    started = Process(write_site(folder, "embedded:ember", continue_within_s=60.0), folder / "log")
    yield started
    end(started)


@pytest.fixture(scope="module")
def undisturbed(site: Process) -> list[Any]:
    streams = [Stream(site.url, body) for body in REQUESTS]
    for stream in streams:
        stream.end()
    return [stream.answer for stream in streams]


def cut_sequences(site: Process) -> dict[str, float]:
    metrics = httpx.get(site.url + "/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("pilotlight_cut_sequences_total")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def num_open(site: Process) -> int:
    (model,) = httpx.get(site.url + "/status").json()["models"]
    return int(model["running"] + model["waiting"])


def assert_idle(site: Process) -> None:
    """Check that every permit, sequence and block has been released (invariant I6)."""

    def is_idle() -> bool:
        status = httpx.get(site.url + "/status").json()
        (model,) = status["models"]
        held = model["kv_blocks_total"] - model["kv_blocks_free"]
        return status["ready"] and not (status["inflight"] or model["running"] or model["waiting"] or held)

    wait_for(is_idle)
    assert "pilotlight_reserved_tokens 0.0" in httpx.get(site.url + "/metrics").text


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(psutil.NoSuchProcess):  # the host may just have died
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("after_events", [1, pytest.param(200, marks=pytest.mark.slow), 700])
def test_every_stream_continues_to_its_undisturbed_answer(
    site: Process, undisturbed: list[Any], after_events: int
) -> None:
    before = cut_sequences(site)
    heard = threading.Semaphore(0)
    engine = site.engine()
    streams = [Stream(site.url, body, on_event=heard.release) for body in REQUESTS]
    for _ in range(after_events):
        assert heard.acquire(timeout=60)
    if after_events == 1:
        wait_for(lambda: num_open(site) >= 12)  # until the requests with long answers are open
    engine.kill()
    for stream in streams:
        stream.end()
    after = cut_sequences(site)
    assert after.get("continued", 0) - before.get("continued", 0) >= (10 if after_events < 700 else 5), (
        "too few streams were open at the kill"
    )
    assert after.get("failed", 0) == 0
    for body, stream, expected in zip(REQUESTS, streams, undisturbed, strict=True):
        assert stream.answer == expected, body
    assert site.engine().pid != engine.pid
    assert_idle(site)


def crash_in_a_step(engine: psutil.Process) -> None:
    """Send a host SIGSEGV during a step."""
    words = engine.cmdline()
    journal = Path(words[words.index("--journal") + 1])

    def is_in_a_step() -> bool:
        engine.send_signal(signal.SIGSTOP)
        if read_journal(journal).computed:
            return True
        engine.send_signal(signal.SIGCONT)
        return False

    wait_for(is_in_a_step)
    engine.send_signal(signal.SIGSEGV)
    with suppress(psutil.NoSuchProcess):  # a thread that was still running has handled SIGSEGV
        engine.send_signal(signal.SIGCONT)


def test_a_request_in_whose_step_two_hosts_crash_is_refused_and_others_continue(site: Process) -> None:
    blamed = asked("Tell me a story about a crash.", temperature=0, max_tokens=400, ignore_eos=True)
    stream = Stream(site.url, blamed)
    assert stream.has_started.wait(60)
    engine = site.engine()
    crash_in_a_step(engine)
    wait_for(lambda: site.engine().pid != engine.pid and num_open(site))
    crash_in_a_step(site.engine())
    stream.end()
    assert stream.events[-2 if stream.events[-1] == "[DONE]" else -1]["error"]["code"] == "request_failed"
    again = Stream(site.url, blamed)
    again.end()
    assert again.events[-1]["error"]["code"] == "request_failed", "the site remembers the request"
    other = Stream(site.url, REQUESTS[0])
    other.end()
    assert other.answer
    assert_idle(site)


def test_a_host_that_hangs_is_killed_and_its_streams_continue(undisturbed: list[Any], tmp_path: Path) -> None:
    file = write_site(tmp_path, "embedded:ember", continue_within_s=60.0, step_deadline_s=6.0)
    site = Process(file, tmp_path / "log")
    try:
        heard = threading.Semaphore(0)
        streams = [Stream(site.url, body, on_event=heard.release) for body in REQUESTS]
        for _ in range(10):  # few: on a busy machine most computed tokens are not sent yet
            assert heard.acquire(timeout=60)
        site.engine().send_signal(signal.SIGSTOP)
        for stream, expected in zip(streams, undisturbed, strict=True):
            stream.end()
            assert stream.answer == expected
        log = site.log.read_text()
        assert re.search(r"took no step for [\d.]+ s; restarting", log)  # 6 s, or longer on a slow machine
        assert_idle(site)
    finally:
        end(site)
