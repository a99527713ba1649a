"""The whole network from a user's view: streams, the official client, typed errors, and no leaks when clients leave."""

import http.client
import json
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from load_tests.local_network import LocalNetwork
from pilotlight.wire.sse import EventDecoder

pytestmark = pytest.mark.smoke

Wait = Callable[[Callable[[], bool], str], None]
LISBON = [{"role": "user", "content": "What is the airport code of Lisbon?"}]


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    request = urllib.request.Request(url, body, {"content-type": "application/json", **(headers or {})}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read()), dict(refusal.headers)


def chat(
    network: LocalNetwork, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": "ember", "messages": LISBON, "max_tokens": 30, "temperature": 0, **body}
    return post(f"{network.url}/v1/chat/completions", json.dumps(body).encode(), headers)


def client_of(network: LocalNetwork, key: str = "test-key") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{network.url}/v1", api_key=key, max_retries=0)


def free_blocks(network: LocalNetwork) -> dict[str, int]:
    return {name: network.site_status(name).models[0].kv_blocks_free for name in network.site_urls}


def at_work(network: LocalNetwork) -> int:
    statuses = [network.site_status(name) for name in network.site_urls]
    return sum(status.inflight + sum(model.running + model.waiting for model in status.models) for status in statuses)


def test_the_printed_curl_line_streams_a_sensible_answer(network: LocalNetwork) -> None:
    line = next(line.strip() for line in network.output + rest_of_greeting(network) if line.strip().startswith("curl "))
    curl, unbuffered, url, _, header, _, body = shlex.split(
        line
    )  # parsed instead of run, as some machines have no curl
    assert (curl, unbuffered, header) == ("curl", "-N", "content-type: application/json")
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = response.read().decode()
    events = EventDecoder().feed(answer.encode())
    assert events[-1].is_done
    chunks = [json.loads(event.data) for event in events[:-1] if event.data is not None]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert "LIS" in text


def rest_of_greeting(network: LocalNetwork) -> list[str]:
    assert network.process.stdout is not None
    lines: list[str] = []
    while not lines or "Ctrl-C stops everything" not in lines[-1]:
        lines.append(network.process.stdout.readline().rstrip("\n"))
    network.output += lines
    return lines


def test_the_openai_client_completes_streams_and_sees_cached_tokens(network: LocalNetwork) -> None:
    client = client_of(network)
    told = {
        "role": "user",
        "content": "My name is Robin and my favourite colour is green. What is the airport code of Lisbon?",
    }
    first = client.chat.completions.create(model="ember", messages=[told], temperature=0, max_tokens=60)
    answer = first.choices[0].message.content
    assert answer
    assert first.usage is not None
    turns = [told, {"role": "assistant", "content": answer}, {"role": "user", "content": "And what is my name?"}]
    pieces, usage = [], None
    asked: dict[str, Any] = {"messages": turns, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(model="ember", temperature=0, max_tokens=60, stream=True, **asked):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "Robin" in "".join(pieces)
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_another_tenant_never_sees_a_cached_prefix(network: LocalNetwork) -> None:
    question = "A long and shared question, sent twice: what is the country of Oslo, please? " * 3
    body = {"messages": [{"role": "user", "content": question}]}
    alice, bob = ({"authorization": f"Bearer {name}", "x-session-affinity": "s"} for name in ("alice", "bob"))
    site = chat(network, body, alice)[2]["x-pilotlight-site"]
    again = chat(network, body, alice)
    assert again[2]["x-pilotlight-site"] == site
    assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    direct = f"{network.site_urls[site]}/v1/chat/completions"  # the site that holds Alice's prefix
    request = json.dumps({"model": "ember", "max_tokens": 3, **body}).encode()
    assert post(direct, request, bob)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert chat(network, body, bob)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert chat(network, body, alice)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_errors_and_answers_speak_the_workers_ai_dialect_there(network: LocalNetwork) -> None:
    base = f"{network.url}/client/v4/accounts/acc/ai/run"
    answered, error, _ = post(f"{base}/ember", b'{"prompt": 5}')
    assert (answered, error["success"], error["errors"][0]["code"]) == (400, False, 5004)
    answered, envelope, _ = post(
        f"{base}/@pilotlight/ember", json.dumps({"messages": LISBON, "max_tokens": 30}).encode()
    )
    assert answered == 200
    assert envelope["success"] is True
    assert "LIS" in envelope["result"]["response"]


def command(network: LocalNetwork, name: str, *arguments: str) -> str:
    """Run a command against the network; return its output."""
    line = [sys.executable, "-m", "pilotlight.runtime.cli.commands", name, "--url", network.url, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout


def test_status_lists_every_process(network: LocalNetwork) -> None:
    listed = json.loads(command(network, "status", "--json"))
    assert sorted((process["role"], process["site"] or "") for process in listed) == sorted(
        [("router", ""), *((role, site) for role in ("site", "engine") for site in network.site_urls)]
    )
    assert all(process["pid"] > 0 and process["url"] for process in listed)
    assert {process["url"] for process in listed if process["role"] == "site"} == set(network.site_urls.values())


def test_chat_on_the_command_line_streams_an_answer(network: LocalNetwork) -> None:
    assert "LIS" in command(network, "chat", "--temperature", "0", LISBON[0]["content"])


def test_a_client_that_leaves_in_mid_stream_frees_every_block(network: LocalNetwork, eventually: Wait) -> None:
    eventually(lambda: at_work(network) == 0, "the network is idle")
    before = free_blocks(network)
    body = {"model": "ember", "messages": LISBON, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    connections = []
    for _ in range(6):
        connection = http.client.HTTPConnection(network.url.removeprefix("http://"), timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(20)
        connections.append((connection, answer))
    assert at_work(network) > 0
    for connection, answer in connections:
        answer.close()
        connection.close()
    eventually(lambda: at_work(network) == 0 and free_blocks(network) == before, "every block is free again")


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "code": {"type": "string", "pattern": "^[A-Z]{3}$"}},
    "required": ["city", "code"],
    "additionalProperties": False,
}
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
WEATHER: Any = {"name": "get_weather", "description": "Weather in a city.", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Lisbon", "Oslo"]}}, "required": ["city"], "additionalProperties": False,
}}  # fmt: skip


def assert_is_city(text: str) -> None:
    city = json.loads(text)
    assert city.keys() == {"city", "code"}
    assert len(city["code"]) == 3


def test_an_answer_follows_its_schema_whole_and_streamed(network: LocalNetwork) -> None:
    asked: dict[str, Any] = {"response_format": CITY_FORMAT, "temperature": 1.3, "max_tokens": 120, "n": 2}
    status, answer, _ = chat(network, asked)
    assert status == 200
    for choice in answer["choices"]:
        assert_is_city(choice["message"]["content"])
    with client_of(network) as client:
        chunks = client.chat.completions.create(
            model="ember", messages=LISBON, stream=True, response_format=CITY_FORMAT, max_tokens=120
        )  # type: ignore[call-overload]
        assert_is_city("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_must_be_called_with_arguments_of_its_schema(network: LocalNetwork, tool_choice: Any) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    for seed in range(3):
        asked = {"tools": tools, "tool_choice": tool_choice, "temperature": 1.5, "seed": seed, "max_tokens": 150}
        (choice,) = chat(network, {**asked, "parallel_tool_calls": False})[1]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (called,) = choice["message"]["tool_calls"]
        assert called["function"]["name"] == "get_weather"
        assert json.loads(called["function"]["arguments"])["city"] in ("Lisbon", "Oslo")
