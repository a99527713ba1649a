"""Grammars on a running network: one that would kill an engine host is refused by name, and streams of another account are undisturbed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from load_tests.local_network import LocalNetwork
from tests.e2e.conftest import NO_STANDBY

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "ember", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
STREAM = {**ASKED, "max_tokens": 200, "ignore_eos": True, "stream": True}
A, B = ({"authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b"))
DEADLY: list[tuple[dict[str, Any], str]] = [
    ({"enum": [-9223372036854775807]}, "-9223372036854775807"),
    ({"type": "integer", "const": -1e300}, "SIGSEGV"),
    ({"enum": ["a", -9223372036854775807]}, "-9223372036854775807"),
]


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(num_sites=2, engine_settings=NO_STANDBY) as running:
        yield running


def engines(network: LocalNetwork) -> set[int]:
    found: set[int] = set()
    for url in network.site_urls.values():
        processes = httpx.get(url + "/status", timeout=60).json()["processes"]
        found |= {process["pid"] for process in processes if process["role"] == "engine"}
    return found


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": {"p": schema}}, "strict": True}}


def streamed(url: str) -> str:
    """Return the text of account B's stream; fail if it does not end with [DONE]."""
    events = httpx.post(url + CHAT, json=STREAM, headers=B, timeout=120).text.split("\n\n")
    assert events[-2] == "data: [DONE]", events[-3:]
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_a_grammar_that_would_end_a_host_is_refused_and_another_account_s_streams_are_undisturbed(
    network: LocalNetwork,
) -> None:
    before, expected = engines(network), streamed(network.url)
    with ThreadPoolExecutor(2) as threads:
        for url in (network.url, *network.site_urls.values()):
            beside = [threads.submit(streamed, network.url) for _ in range(2)]
            for schema, part in DEADLY:
                for fields in ({"guided_json": schema}, {"tools": [strict(schema)]}):
                    answer = httpx.post(url + CHAT, json={**ASKED, **fields}, headers=A, timeout=120)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), answer.text
                    assert part in answer.text
            assert [each.result() for each in beside] == [expected] * 2
    assert engines(network) == before
    metrics = httpx.get(network.url + "/metrics", timeout=60).text
    assert 'result="lost"' not in metrics, "no stream may lose its site"
