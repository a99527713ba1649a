"""Embeddings in both dialects, with a fake engine whose vector depends on the text's length."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Submit, TokenOutput
from pilotlight.wire.embeddings import from_base64
from tests.asgi import call, eventually, start
from tests.fakes import FakeEngineClient, FakeLauncher, Step, ids, says
from tests.runtime.conftest import Site, SiteMaker

PATH = "/v1/embeddings"
RUN = "/client/v4/accounts/acc1/ai/run/@test/tiny"
ASKED: dict[str, Any] = {"model": "tiny", "input": "Hello"}


def vector_of(length: int) -> tuple[float, ...]:
    return (float(length), 3.0, 4.0, 0.5)


def embeds(submit: Submit) -> list[Step]:
    return [0.0, TokenOutput("", finish_reason="stop", embedding=vector_of(len(submit.prompt_token_ids)))]


def prepare(client: FakeEngineClient) -> None:
    client.pooling, client.embedding_size, client.answer = "last", 4, embeds


@pytest.fixture
async def embedder(make_site: SiteMaker) -> AsyncIterator[Site]:
    async with make_site(launcher=FakeLauncher(prepare)) as site:
        yield site
        await site.is_idle()


@pytest.mark.parametrize("path", [PATH, "/ai/v1/embeddings"])
async def test_a_text_is_embedded(embedder: Site, path: str) -> None:
    answer = await call(embedder.app, path, {**ASKED, "model": "@test/tiny", "user": "someone"})
    assert answer.status == 200
    assert answer.json == {
        "object": "list",
        "model": "@test/tiny",
        "data": [{"object": "embedding", "index": 0, "embedding": [5.0, 3.0, 4.0, 0.5]}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    (submit,) = embedder.engine.submits
    assert (submit.prompt_token_ids, submit.pooling) == (ids("Hello"), "last")


async def test_a_tokenizer_without_a_decoder_serves_an_embedding_model(
    make_site: SiteMaker, model_directory: Path
) -> None:
    file = model_directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": None}))
    async with make_site(launcher=FakeLauncher(prepare)) as site:
        assert (await call(site.app, PATH, ASKED)).json["usage"]["prompt_tokens"] == 5


async def test_a_models_prompt_stands_before_every_text_and_no_list_of_tokens(make_site: SiteMaker) -> None:
    def prompted(client: FakeEngineClient) -> None:
        prepare(client)
        client.text_prompt = "query: "

    async with make_site(launcher=FakeLauncher(prompted)) as site:
        answer = await call(site.app, PATH, {**ASKED, "input": ["a", "bc", [7, 8]]})
        sent = [submit.prompt_token_ids for submit in site.engine.submits]
        assert sent == [ids("query: a"), ids("query: bc"), (7, 8)]
        assert answer.json["usage"]["prompt_tokens"] == 8 + 9 + 2


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
async def test_texts_are_lowered_for_a_model_that_was_trained_so(
    make_site: SiteMaker, model_directory: Path, kind: str
) -> None:
    (model_directory / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    async with make_site(launcher=FakeLauncher(prepare)) as site:
        await call(site.app, PATH, {**ASKED, "input": "Hello ÄΣ"})
        assert [submit.prompt_token_ids for submit in site.engine.submits] == [ids("hello äσ")]


@pytest.mark.parametrize(
    ("texts", "prompts"),
    [
        (["a", "bcd"], [ids("a"), ids("bcd")]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a", [7, 8]], [ids("a"), (7, 8)]),
    ],
    ids=["texts", "token ids", "lists of token ids", "both"],
)
async def test_every_form_of_input_is_embedded_in_order(embedder: Site, texts: Any, prompts: list[Any]) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, "input": texts})
    assert [submit.prompt_token_ids for submit in embedder.engine.submits] == prompts
    assert [item["embedding"][0] for item in answer.json["data"]] == [len(prompt) for prompt in prompts]
    assert [item["index"] for item in answer.json["data"]] == list(range(len(prompts)))
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_many_texts_go_through_the_engine_a_few_at_a_time(embedder: Site) -> None:
    most = 0

    def watched(submit: Submit) -> list[Step]:
        nonlocal most
        most = max(most, len(embedder.engine.open))
        return [0.001 * (len(submit.prompt_token_ids) % 3), *embeds(submit)]

    embedder.engine.answer = watched
    texts = ["x" * (1 + i % 50) for i in range(300)]
    answer = await call(embedder.app, PATH, {**ASKED, "input": texts})
    assert [item["embedding"][0] for item in answer.json["data"]] == [len(text) for text in texts]
    assert most == 64


async def test_base64_is_little_endian_fp32(embedder: Site) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, "encoding_format": "base64"})
    assert from_base64(answer.json["data"][0]["embedding"]) == vector_of(5)


async def test_dimensions_keep_the_first_numbers_at_length_one(embedder: Site) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, "dimensions": 2})
    assert answer.json["data"][0]["embedding"] == pytest.approx([5 / math.sqrt(34), 3 / math.sqrt(34)])
    whole = await call(embedder.app, PATH, {**ASKED, "dimensions": 4})
    assert whole.json["data"][0]["embedding"] == list(vector_of(5))


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"input": []}, "input", "not empty"),
        ({"input": ["a", ""]}, "input", "text 1 is empty"),
        ({"input": [[1, -1]]}, "input", "neither a text nor a list of token ids"),
        ({"input": 5}, "input", "must be a text"),
        ({"input": None}, "input", "required"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [1, 2, 999]}, "input", "999, outside the vocabulary of 261"),
        ({"input": ["a", [999]]}, "input[1]", "input[1] has the token id 999"),
        ({"dimensions": 5}, "dimensions", "embeddings of 4 numbers: dimensions must be from 1 to 4"),
    ],
)
async def test_mistakes_are_named(embedder: Site, change: dict[str, Any], param: str, said: str) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, **change})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert said in answer.json["error"]["message"]
    assert embedder.engine.submits == []


async def test_an_unknown_field_is_named_in_a_header(embedder: Site) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, "dimension": 2})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "dimension")


async def test_a_text_that_is_too_long_says_which_and_by_how_much(embedder: Site) -> None:
    answer = await call(embedder.app, PATH, {**ASKED, "input": ["a", "x" * 513]})
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json["error"]["param"] == "input[1]"
    assert "513 tokens and 'tiny' takes 512" in answer.json["error"]["message"]
    assert (await call(embedder.app, PATH, {**ASKED, "input": "x" * 512})).status == 200


async def test_a_chat_model_makes_no_embeddings(site: Site) -> None:
    answer = await call(site.app, PATH, ASKED)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "invalid_request"
    assert answer.json["error"]["param"] == "model"
    assert "makes no embeddings; embedding models of this site: none" in answer.json["error"]["message"]
    native = await call(site.app, RUN, {"text": ["Hello"]})
    assert (native.status, native.json["errors"][0]["code"]) == (400, 5004)
    missing = await call(site.app, PATH, {**ASKED, "model": "nope"})
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hi", "stream": True}),
        (RUN, {"prompt": "Hi"}),
    ],
)
async def test_an_embedding_model_generates_nothing(embedder: Site, path: str, body: dict[str, Any]) -> None:
    answer = await call(embedder.app, path, body)
    assert answer.status == 400
    assert "is an embedding model" in answer.body.decode()
    assert embedder.engine.submits == []


async def test_models_say_which_is_which(embedder: Site, make_site: SiteMaker) -> None:
    (model,) = (await call(embedder.app, "/v1/models")).json["data"]
    assert (model["type"], model["embedding_size"], model["context_length"]) == ("embedding", 4, 512)
    (card,) = (await call(embedder.app, "/client/v4/accounts/a/ai/models/search")).json["result"]
    assert card["task"]["name"] == "Text Embeddings"
    assert {"property_id": "output_dimensions", "value": "4"} in card["properties"]
    async with make_site() as chat:
        (model,) = (await call(chat.app, "/v1/models")).json["data"]
        assert model["type"] == "chat"
        assert "embedding_size" not in model


@pytest.mark.parametrize("text", ["Hello", ["Hello", "Hi"]])
async def test_workers_ai_gives_shape_and_data(embedder: Site, text: Any) -> None:
    answer = await call(embedder.app, RUN, {"text": text})
    texts = [text] if isinstance(text, str) else text
    assert answer.json["success"] is True
    assert answer.json["result"] == {
        "shape": [len(texts), 4], "data": [list(vector_of(len(item))) for item in texts], "pooling": "last"
    }  # fmt: skip


async def test_workers_ai_may_ask_for_another_pooling(embedder: Site) -> None:
    answer = await call(embedder.app, RUN, {"text": "Hello", "pooling": "mean"})
    assert answer.json["result"]["pooling"] == "mean"
    assert embedder.engine.submits[0].pooling == "mean"
    assert (await call(embedder.app, RUN, {"text": "Hello", "pooling": "max"})).status == 400


async def test_a_message_whose_parts_hold_the_word_text_is_still_a_chat(site: Site) -> None:
    site.engine.script = says("Hello")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    answer = await call(site.app, RUN, {"messages": messages})
    assert answer.json["result"]["response"] == "Hello"


async def test_tenants_are_kept_apart(embedder: Site) -> None:
    for token in ("alice", "bob"):
        await call(embedder.app, PATH, ASKED, authorization=f"Bearer {token}")
    first, second = (submit.salt for submit in embedder.engine.submits)
    assert first != second


async def test_a_host_that_dies_has_its_texts_embedded_by_the_next(embedder: Site) -> None:
    first = embedder.launcher.hosts[0]

    async def die() -> None:
        first.die()

    embedder.engine.answer = lambda submit: [die, 30]
    answer = await call(embedder.app, PATH, {**ASKED, "input": ["a", "bc", "def"]})
    assert [item["embedding"][0] for item in answer.json["data"]] == [1, 2, 3]


async def test_a_client_that_leaves_frees_its_texts(embedder: Site) -> None:
    embedder.engine.answer = lambda submit: [30]
    exchange = start(embedder.app, PATH, {**ASKED, "input": ["a"] * 100})
    await eventually(lambda: len(embedder.engine.open) == 64)
    assert embedder.admission.reserved == {"tiny": 64}, "what the engine has at once"
    exchange.disconnect()
    await embedder.is_idle()
    assert len(embedder.engine.aborted) == 64


async def test_an_engine_that_refuses_one_text_ends_the_request(embedder: Site) -> None:
    from pilotlight.engine.api.client import EngineError

    waits = asyncio.Event()
    embedder.engine.answer = lambda submit: (
        [EngineError("overloaded", "1024 sequences wait")] if submit.prompt_token_ids == ids("bad") else [waits]
    )
    answer = await call(embedder.app, PATH, {**ASKED, "input": ["a", "bad", "c"]})
    assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) > 0


async def test_embeddings_are_counted(embedder: Site) -> None:
    await call(embedder.app, PATH, ASKED)
    text = (await call(embedder.app, "/metrics")).body.decode()
    for line in (
        'pilotlight_requests_total{model_name="tiny",outcome="stop"} 1.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 5.0',
        'pilotlight_http_responses_total{endpoint="embeddings",status="200"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
    ):
        assert line in text, line
