"""Images through a router and two sites, with a tiny random vision model: cached images are never confused, and streams survive the death of a
site."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from load_tests.local_network import LocalNetwork
from load_tests.scenarios.site_death import disturb, listen
from tests.e2e.conftest import NO_STANDBY
from tests.engine.pictures import PLACEHOLDER, picture, write_vision
from tests.pictures import TEMPLATE, data_url

pytestmark = pytest.mark.slow

SPECIAL = {0: "<|im_start|>", 1: "<|im_end|>", PLACEHOLDER: "<|media_pad|>"}
TEXT = "what does this image show? " * 4
LINES = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 9, "maxItems": 9}
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 1},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LINES}}, "ignore_eos": False},
]


@pytest.fixture(scope="module", params=["kimi k2.5", "qwen 3 vl"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    directory = tmp_path_factory.mktemp("checkpoint") / "seer"
    write_vision(directory, request.param, seed=3)
    write_tokenizer(directory)
    model = f'\n[[models]]\nname = "seer"\nsource = "{directory}"\n'
    with LocalNetwork(num_sites=2, site_settings=model, engine_settings=NO_STANDBY) as running:
        yield running


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a token for each byte, and unused tokens up to the checkpoint's vocabulary size."""
    count = json.loads((directory / "config.json").read_text())["text_config"]["vocab_size"]
    alphabet = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {SPECIAL.get(i) or next(alphabet, f"~{i}~"): i for i in range(count)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": SPECIAL[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def asked(file: bytes, seed: int, **fields: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": data_url(file)}}, {"type": "text", "text": TEXT}]
    common = {"model": "seer", "messages": [{"role": "user", "content": content}], "seed": seed, "ignore_eos": True}
    return {**common, **fields}


def test_two_images_never_share_and_the_same_one_is_found_again(network: LocalNetwork) -> None:
    def ask(file: bytes) -> tuple[int, str]:
        answer = httpx.post(
            f"{network.site_urls['ams1']}/v1/chat/completions", json=asked(file, 1, max_tokens=8), timeout=60
        )
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, answer.json()["choices"][0]["message"]["content"]

    one, other = picture(40, 30, 1), picture(40, 30, 2)
    (cached_one, said_one), (cached_other, said_other) = ask(one), ask(other)
    assert cached_one == 0
    assert cached_other < 16, "no block that contains the image may be cached"
    assert said_one != said_other
    for file, said in ((one, said_one), (other, said_other)):
        cached, again = ask(file)
        assert again == said
        assert cached >= 96
    metrics = httpx.get(f"{network.site_urls['ams1']}/metrics").text
    assert 'pilotlight_image_encodes_total{engine="0",model_name="seer"} 2.0' in metrics


def test_streams_with_images_continue_at_the_other_site(network: LocalNetwork) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.9}
    bodies = [
        asked(picture(40 + i, 30 + 2 * i, i), i, **streamed | KINDS[i % len(KINDS)], max_tokens=96) for i in range(12)
    ]
    undisturbed = asyncio.run(listen(network.url, bodies, lambda heard: None))
    assert all(mine.is_done and mine.error is None for mine in undisturbed), [mine.error for mine in undisturbed]
    after_events = sum(len(mine.arrivals_s) for mine in undisturbed) // 6
    heard, result = disturb(network, "kill", bodies, after_events)
    assert (result["sites_struck"], result["lost"]) == (1, 0)
    assert result["continued"] == result["disturbed"] > 0
    assert [mine.answer for mine in heard] == [mine.answer for mine in undisturbed]
