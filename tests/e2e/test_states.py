"""A tiny model with recurrent state, through a router and two sites, beside another model in one arena: answers, prefix hits, grammars, sleep, and
the death of a site.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from transformers import Qwen3_5TextConfig

from load_tests.local_network import LocalNetwork
from load_tests.scenarios.site_death import disturb, listen
from tests.checkpoints import write_speaking
from tests.e2e.conftest import NO_STANDBY
from tests.engine.families import DELTA, config

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Paris"]}, "people": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
SLEEPING = 'residency = "auto"\nsleep_after_s = 2.0\n'


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    layers = ["linear_attention", "linear_attention", "full_attention"]
    hybrid = config(
        Qwen3_5TextConfig,
        layer_types=layers,
        vocab_size=2048,
        max_position_embeddings=2048,
        eos_token_id=2,
        **DELTA,
    )
    directory = write_speaking(tmp_path_factory.mktemp("checkpoint") / "mixed", hybrid)
    model = f'\n[[models]]\nname = "mixed"\nsource = "{directory}"\n{SLEEPING}'
    with LocalNetwork(num_sites=2, site_settings=model, engine_settings=NO_STANDBY) as running:
        yield running


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "mixed", "messages": [{"role": "user", "content": text}], "ignore_eos": True, **fields}


def answered(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url + CHAT, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_a_stream_has_the_text_of_the_whole_answer_and_a_prompt_is_found_again(network: LocalNetwork) -> None:
    body = asked("Tell me a story about the sea and a lamp. " * 40, temperature=0, max_tokens=24)
    first, again = (answered(network.site_urls["ams1"], body) for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again)]
    assert cached[0] == 0
    assert again["usage"]["prompt_tokens"] / 2 < cached[1] < again["usage"]["prompt_tokens"]
    assert first["choices"] == again["choices"]
    (heard,) = asyncio.run(listen(network.url, [{**body, "stream": True}], lambda heard: None))
    assert heard.text[0] == first["choices"][0]["message"]["content"]


def test_json_follows_its_schema(network: LocalNetwork) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    said = answered(
        network.url,
        asked("Which city?", temperature=0.9, seed=1, max_tokens=200, response_format=form, ignore_eos=False),
    )
    found = json.loads(said["choices"][0]["message"]["content"])
    assert found["city"] in ("Lisbon", "Paris")
    assert 0 <= found["people"] <= 999


def test_it_answers_the_same_after_a_sleep(
    network: LocalNetwork, eventually: Callable[[Callable[[], bool], str], None]
) -> None:
    site, body = network.site_urls["ams1"], asked("Tell me about snow.", temperature=0, max_tokens=16)
    said = answered(site, body)["choices"]

    def sleeps() -> bool:
        models = httpx.get(f"{site}/status", timeout=60).json()["models"]
        return {model["name"]: model["residency"] for model in models}["mixed"] == "host"

    eventually(sleeps, "the model fell asleep")
    assert answered(site, body)["choices"] == said


@pytest.mark.smoke
def test_sixteen_streams_beside_another_model_s_continue_at_the_other_site(network: LocalNetwork) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.9, "max_tokens": 96}
    bodies = [asked(f"Tell me a story about {i} lamps.", seed=i, **streamed) for i in range(16)]
    bodies += [{**body, "model": "ember"} for body in bodies[:4]]
    undisturbed = asyncio.run(listen(network.url, bodies, lambda heard: None))
    assert all(mine.is_done and mine.error is None for mine in undisturbed), [mine.error for mine in undisturbed]
    after_events = sum(len(mine.arrivals_s) for mine in undisturbed) // 6
    heard, result = disturb(network, "kill", bodies, after_events)
    assert (result["sites_struck"], result["lost"]) == (1, 0)
    assert result["continued"] == result["disturbed"] > 0
    assert [mine.answer for mine in heard] == [mine.answer for mine in undisturbed]
