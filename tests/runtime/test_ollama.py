"""Ollama's API at a site: chats and completions as lines or whole, embeddings, models, and refused fields."""

import base64
import json
from typing import Any

import pytest

from pilotlight.dialects.ollama import REFUSED
from tests.asgi import Exchange, call
from tests.fakes import CHATML, FakeEngineClient, FakeLauncher, ids, says
from tests.runtime.conftest import Site, SiteMaker

CHAT, GENERATE = "/api/chat", "/api/generate"
SAID = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [SAID]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
CALLED = 'Ok. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def lines(answer: Exchange) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.split(b"\n")[:-1]]


async def test_a_chat_is_a_stream_of_lines_unless_it_says_otherwise(site: Site) -> None:
    site.engine.script = says("Hello")
    *pieces, last = lines(await call(site.app, CHAT, ASKED))
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello"
    assert {(piece["model"], piece["message"]["role"], piece["done"]) for piece in pieces} == {
        ("tiny", "assistant", False)
    }
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(ids(PROMPT)), 6)
    assert last["total_duration"] >= last["eval_duration"] > 0
    assert site.engine.submits[0].prompt_token_ids == ids(PROMPT)


async def test_a_whole_chat_is_one_object(site: Site) -> None:
    site.engine.script = says("Hello", finish="length")
    answer = await call(site.app, CHAT, {**ASKED, "stream": False})
    body = answer.json
    assert answer.headers["content-type"] == "application/json"
    assert body["message"] == {"role": "assistant", "content": "Hello"}
    assert body["done"]
    assert body["done_reason"] == "length"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_has_its_arguments_as_an_object_and_its_history_is_taken_back(
    site: Site, is_streamed: bool
) -> None:
    site.engine.script = says(CALLED)
    asked = {**ASKED, "tools": [TOOL], "stream": is_streamed}
    answer = await call(site.app, CHAT, asked)
    messages = [line["message"] for line in (lines(answer) if is_streamed else [answer.json])]
    (made,) = [one for message in messages for one in message.get("tool_calls", ())]
    assert made["function"] == {"name": "f", "arguments": {"a": 1}, "index": 0}
    assert "".join(message["content"] for message in messages) == "Ok."
    site.engine.script = says("Fine.")
    turn = {"role": "assistant", "content": "Ok.", "tool_calls": [made]}
    result = {"role": "tool", "tool_name": "f", "content": "7"}
    again = await call(site.app, CHAT, {**asked, "messages": [SAID, turn, result], "stream": False})
    assert again.json["message"]["content"] == "Fine.", again.body


async def test_a_name_may_have_the_tag_that_clients_append(site: Site) -> None:
    answer = await call(site.app, CHAT, {**ASKED, "model": "tiny:latest", "stream": False})
    assert answer.json["model"] == "tiny:latest"
    assert (await call(site.app, "/api/show", {"name": "tiny:latest"})).status == 200


async def test_options_choose_tokens_and_those_of_a_runner_are_named_as_ignored(site: Site) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 4, "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 4096,
    }  # fmt: skip
    answer = await call(site.app, CHAT, {**ASKED, "options": options, "stream": False, "keep_alive": "5m"})
    sampling = site.engine.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.9)
    assert (sampling.seed, sampling.repetition_penalty) == (4, 1.1)
    assert answer.headers["x-ignored-fields"] == "options.num_ctx"


@pytest.mark.parametrize("options", [{"num_predict": -1, "seed": -1}, {"num_predict": -2}, {}])
async def test_numbers_below_zero_are_no_limit(site: Site, options: dict[str, Any]) -> None:
    assert (await call(site.app, CHAT, {**ASKED, "options": options, "stream": False})).status == 200
    assert site.engine.submits[0].sampling.max_tokens == 512 - len(ids(PROMPT))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predict": "all"}}, "options.num_predict"),
        ({"think": "a bit"}, "think"),
        ({"format": "xml"}, "format"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "images": [""]}]}, "messages[0].images"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_a_wrong_field_is_named_in_ollamas_form_of_an_error(
    site: Site, wrong: dict[str, Any], field: str
) -> None:
    answer = await call(site.app, CHAT, {**ASKED, **wrong})
    assert answer.status == 400
    assert answer.json["error"].startswith(field), answer.body


async def test_a_format_is_enforced(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await call(site.app, CHAT, {**ASKED, "format": schema, "stream": False})
    await call(site.app, GENERATE, {"model": "tiny", "prompt": "Hi", "format": "json", "stream": False})
    kinds = [
        submit.constraint and (submit.constraint.kind, json.loads(submit.constraint.text))
        for submit in site.engine.submits
    ]
    assert kinds == [("json_schema", schema), ("json_schema", {"type": "object"})]


async def test_a_prompt_is_a_users_message_and_a_raw_one_is_the_text_itself(site: Site) -> None:
    site.engine.script = says("Hello")
    body = (
        await call(site.app, GENERATE, {"model": "tiny", "prompt": "Hi", "system": "Be brief.", "stream": False})
    ).json
    assert (body["response"], body["done"]) == ("Hello", True)
    *pieces, last = lines(await call(site.app, GENERATE, {"model": "tiny", "prompt": "Hi", "raw": True}))
    assert "".join(piece["response"] for piece in pieces) == "Hello"
    assert last["response"] == ""
    assert last["done_reason"] == "stop"
    told, raw = [submit.prompt_token_ids for submit in site.engine.submits]
    assert (told, raw) == (ids("<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT), ids("Hi"))


@pytest.mark.parametrize("field", [{"suffix": "}", "raw": True}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}])
async def test_what_a_completion_cannot_have_here_is_refused_by_name(site: Site, field: dict[str, Any]) -> None:
    answer = await call(site.app, GENERATE, {"model": "tiny", "prompt": "Hi", **field})
    assert (answer.status, answer.json["error"].startswith(next(iter(field)))) == (400, True)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": []}), (GENERATE, {"keep_alive": "5m"}), (GENERATE, {"prompt": ""})]
)
async def test_a_request_without_a_prompt_wakes_its_model(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = (await call(site.app, path, {"model": "tiny", **body})).json
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert site.engine.submits == []


THINKING = "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}" + CHATML


async def test_thinking_is_apart_from_the_answer(make_site: SiteMaker, model_directory: Any) -> None:
    config = model_directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": THINKING}))
    async with make_site() as site:
        site.engine.script = says("<think>Hm.</think>Hello")
        *pieces, _ = lines(await call(site.app, CHAT, {**ASKED, "think": True}))
        assert "".join(piece["message"].get("thinking", "") for piece in pieces) == "Hm."
        assert "".join(piece["message"]["content"] for piece in pieces) == "Hello"
        body = (await call(site.app, CHAT, {**ASKED, "stream": False})).json
        assert (body["message"]["thinking"], body["message"]["content"]) == ("Hm.", "Hello")
        assert "thinking" in (await call(site.app, "/api/show", {"model": "tiny"})).json["capabilities"]


async def test_logprobs_are_sent_where_they_are_requested(site: Site) -> None:
    site.engine.script = says("Hi", logprobs=True)
    body = (await call(site.app, CHAT, {**ASKED, "logprobs": True, "top_logprobs": 1, "stream": False})).json
    assert [one["token"] for one in body["logprobs"]] == ["H", "i"]
    assert body["logprobs"][0]["logprob"] == -0.5


async def test_an_error_amid_a_stream_is_its_last_line(site: Site) -> None:
    from pilotlight.engine.api.client import EngineError

    site.engine.script = [*says("He", finish=None), EngineError("engine_error", "a step failed")]
    *_, last = lines(await call(site.app, CHAT, ASKED))
    assert last["error"] == "a step failed"


async def test_models_are_listed_described_and_not_changed(site: Site) -> None:
    (listed,) = (await call(site.app, "/api/tags")).json["models"]
    assert (listed["name"], listed["model"], len(listed["digest"]), listed["size"]) == ("tiny", "tiny", 64, 1000)
    (awake,) = (await call(site.app, "/api/ps")).json["models"]
    assert (awake["model"], awake["context_length"]) == ("tiny", 512)
    shown = (await call(site.app, "/api/show", {"model": "tiny"})).json
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 512
    assert (await call(site.app, "/api/version")).json["version"].count(".") == 2
    assert (await call(site.app, "/api/pull", {"model": "tiny", "stream": True})).json == {"status": "success"}
    missing = await call(site.app, "/api/pull", {"model": "llama3"})
    assert (missing.status, "llama3" in missing.json["error"]) == (404, True)
    for path, instead in REFUSED.items():
        refused = await call(site.app, path.format(digest="sha256:0"), {"model": "tiny"})
        assert (refused.status, instead in refused.json["error"]) == (501, True)


async def test_embeddings_are_lists_of_vectors(make_site: SiteMaker) -> None:
    from pilotlight.engine.api.protocol import TokenOutput

    def embedder(client: FakeEngineClient) -> None:
        client.pooling, client.embedding_size = "mean", 2
        client.answer = lambda submit: [TokenOutput("", (), finish_reason="stop", embedding=(0.6, 0.8))]

    async with make_site(launcher=FakeLauncher(embedder)) as site:
        body = (await call(site.app, "/api/embed", {"model": "tiny", "input": ["a", "b"]})).json
        assert (body["model"], body["embeddings"], body["prompt_eval_count"]) == ("tiny", [[0.6, 0.8]] * 2, 2)
        assert (await call(site.app, "/api/embed", {"model": "tiny", "input": "a"})).json["embeddings"] == [[0.6, 0.8]]
        older = await call(site.app, "/api/embeddings", {"model": "tiny", "prompt": "a"})
        assert older.json == {"embedding": [0.6, 0.8]}
        assert (await call(site.app, "/api/show", {"model": "tiny"})).json["capabilities"] == ["embedding"]
        refused = await call(site.app, "/api/embed", {"model": "tiny", "input": [""]})
        assert (refused.status, "empty" in refused.json["error"]) == (400, True)


async def test_an_image_reaches_a_model_that_has_eyes_only(site: Site) -> None:
    picture = base64.b64encode(b"\x89PNG").decode()
    answer = await call(site.app, CHAT, {**ASKED, "messages": [{**SAID, "images": [picture]}]})
    assert (answer.status, "image" in answer.json["error"]) == (400, True)
