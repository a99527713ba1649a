"""The example functions work as described at a site in a separate process."""

import json
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from load_tests.local_network import free_ports
from tests.examples.conftest import FUNCTIONS

pytestmark = pytest.mark.process


def events_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def test_hello_greets(site: httpx.Client) -> None:
    assert site.get("hello/?name=Ada").json() == {"message": "Hello, Ada!"}


def test_the_counter_counts_by_name(site: httpx.Client) -> None:
    assert [site.post("counter/visits").json() for _ in range(3)][-1] == {"visits": 3}
    site.post("counter/others")
    assert site.get("counter/").json() == {"others": 1, "visits": 3}
    assert site.get("counter/vis").json() == {"visits": 3}
    assert site.put("counter/visits").status_code == 405


def test_the_chat_calls_its_tool_and_streams_what_the_model_makes_of_it(site: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first, *answer, last = events_of(site.post("chat/", json={"messages": messages}))
    assert first == {"tool": "get_weather", "arguments": {"city": "Paris"}}
    assert last == "[DONE]"
    assert len(answer) > 1
    assert "18" in "".join(event.get("response") or "" for event in answer)


def test_the_chat_without_a_call_is_a_plain_answer(site: httpx.Client) -> None:
    first, *_, last = events_of(site.post("chat/", json={"messages": [{"role": "user", "content": "Hello!"}]}))
    assert first["response"]
    assert last == "[DONE]"


def test_fastapi_validates_streams_and_describes_itself(site: httpx.Client) -> None:
    pytest.importorskip("fastapi")
    assert "ember" in " ".join(site.get("fastapi/").json())
    events = events_of(site.post("fastapi/ask", json={"text": "Hello!", "max_tokens": 8}))
    assert (len(events) > 1, events[-1]) == (True, "[DONE]")
    refused = site.post("fastapi/ask", json={"text": "", "max_tokens": 8})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "text"])
    assert site.get("fastapi/openapi.json").json()["info"]["title"] == "Questions"


def test_pilotlight_dev_serves_an_example_at_the_root_and_ends_on_request() -> None:
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "pilotlight.runtime.cli.commands",
        "dev",
        str(FUNCTIONS / "hello"),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if f"http://127.0.0.1:{port}/" in line:
                break
        ends_at = time.monotonic() + 30
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/?name=dev", timeout=30)
                break
            except httpx.TransportError:
                assert time.monotonic() < ends_at
                time.sleep(0.05)
        assert answer.json() == {"message": "Hello, dev!"}
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 0
