"""Every invalid request gets a clear error with the right status and dialect, and the next request works."""

import json
from typing import Any

import pytest

from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from tests.asgi import call
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
COMPLETIONS = "/ai/v1/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Hi"}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content, **more}]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def calls(*arguments: Any) -> dict[str, Any]:
    made = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return {**HELLO, "messages": [{"role": "assistant", "tool_calls": made}]}


def tools(*parameters: Any) -> dict[str, Any]:
    return {
        **HELLO,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": each}} for each in parameters],
    }


# Errors within a body are tested in tests/dialects/body/test_bodies.py.
BAD_CHATS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({**HELLO, "model": "nope"}, 404, "model_not_found", "model"),
    (user([3]), 400, "invalid_request", "messages[0].content"),
    (user("Hi" * 300), 400, "context_length_exceeded", "messages"),
    ({**HELLO, "stop": ["a"] * 129}, 400, "invalid_request", "stop"),
    ({**HELLO, "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "invalid_request", "logit_bias"),
    # Many elements in few bytes, or deep nesting, whose processing would take long or fail.
    ({**HELLO, "messages": HELLO["messages"] * 8193}, 400, "invalid_request", "messages"),
    ({**HELLO, "messages": [0] * 1_000_000}, 400, "invalid_request", "messages"),
    (user([{"type": "text", "text": ""}] * 1025), 400, "invalid_request", "messages[0].content"),
    (calls(*["{}"] * 1025), 400, "invalid_request", "messages[0].tool_calls"),
    (tools(*[{}] * 1025), 400, "invalid_request", "tools"),
    *((tools({}, nested(depth)), 400, "invalid_request", "tools[1].function.parameters") for depth in (101, 150, 250, 900)),
    (tools({"a": [[]] * 1000 + [nested(101)]}), 400, "invalid_request", "tools[0].function.parameters"),
]  # fmt: skip

BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({**TEXT, "prompt": ["a"] * 65}, 400, "invalid_request", "prompt"),
    ({**TEXT, "prompt": ["a", "b" * 600]}, 400, "context_length_exceeded", "prompt"),
    ({**TEXT, "prompt": [5] * 512}, 400, "context_length_exceeded", "prompt"),
]


async def refused(site: Site, answer: Any, status: int, code: str, param: str | None) -> None:
    assert (answer.status, answer.json["error"]["code"], answer.json["error"]["param"]) == (status, code, param)
    assert len(answer.json["error"]["message"]) > 10
    assert site.engine.submits == []
    assert (await call(site.app, CHAT, HELLO)).status == 200


@pytest.mark.parametrize(
    ("body", "code"), [(b"", "malformed_json"), (b"[" * 100_000, "malformed_json"), (b"[1, 2]", "invalid_request")]
)
async def test_a_body_that_is_no_object_is_refused(site: Site, body: bytes, code: str) -> None:
    await refused(site, await call(site.app, CHAT, body=body), 400, code, None)


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD_CHATS)
async def test_a_bad_chat_is_refused_by_name(site: Site, body: Any, status: int, code: str, param: str | None) -> None:
    await refused(site, await call(site.app, CHAT, body), status, code, param)


@pytest.mark.parametrize("body", [tools(nested(100)), calls(nested(100), json.dumps(nested(100)))])
async def test_what_is_nested_as_deep_as_may_be_is_rendered(site: Site, body: Any) -> None:
    assert (await call(site.app, CHAT, body)).json["error"]["code"] == "context_length_exceeded"
    assert (await call(site.app, CHAT, {**body, "messages": [*body["messages"], {"role": "x"}]})).status == 400


async def test_json_that_is_not_rendered_may_be_as_deep_as_it_parses(site: Site) -> None:
    deep: Any = 1
    for _ in range(800):
        deep = [deep]
    answered = {"role": "assistant", "content": "Hi", "annotations": deep}
    assert (await call(site.app, CHAT, {**HELLO, "messages": [answered], "metadata": deep})).status == 200
    for name in ("messages", "tools", "stop", "temperature", "response_format", "logit_bias"):
        assert (await call(site.app, CHAT, {**HELLO, name: deep})).status == 400


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD_COMPLETIONS)
async def test_a_bad_completion_is_refused_by_name(
    site: Site, body: Any, status: int, code: str, param: str | None
) -> None:
    await refused(site, await call(site.app, COMPLETIONS, body), status, code, param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(
    site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    original = Tokenizer.encode

    def noting(self: Tokenizer, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        encoded.append(len(text))
        return original(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    body = user("a" * 1_000_000) if path == CHAT else {**TEXT, "prompt": "a" * 1_000_000}
    answer = await call(site.app, path, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert (
        "maximum context length is 512 tokens, answer included; the prompt is too long: it has more than 1024"
        in answer.json["error"]["message"]
    )
    assert sum(encoded) < 10_000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**HELLO, "messages": []}, "messages: must not be empty"),
        ({**HELLO, "messages": "Hi"}, "messages: must be a list"),
        ({**HELLO, "messages": ["Hi"]}, "messages[0]: must be an object"),
        ({**HELLO, "stream": True, "stream_options": "x"}, "stream_options: must be an object"),
        ({**HELLO, "tools": [3]}, "tools[0]: must be an object"),
    ],
)
async def test_a_mistake_is_said_in_the_words_of_the_api(site: Site, body: Any, message: str) -> None:
    assert (await call(site.app, CHAT, body)).json["error"]["message"] == message


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {**HELLO, "temprature": 0.5}, "temprature"),
    (CHAT, {**HELLO, "stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    (COMPLETIONS, {**TEXT, "messages": []}, "messages"),
    ("/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi", "num_ctx": 5}, "num_ctx"),
    ("/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi", "num_ctx": 5, "stream": True}, "num_ctx"),
]


@pytest.mark.parametrize(("path", "body", "name"), UNKNOWN)
async def test_an_unknown_field_is_named_in_a_header_and_means_nothing(
    site: Site, path: str, body: dict[str, Any], name: str
) -> None:
    answer = await call(site.app, path, body)
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, name)


@pytest.mark.parametrize(("path", "body", "name"), UNKNOWN)
async def test_an_unknown_field_is_refused_where_the_site_file_says_so(
    make_site: SiteMaker, path: str, body: dict[str, Any], name: str
) -> None:
    async with make_site(limits={"strict_fields": True}) as site:
        answer = await call(site.app, path, body)
        assert answer.status == 400
        assert f"unknown parameter {name!r}" in json.dumps(answer.json)
        assert site.engine.submits == []


async def test_a_header_holds_whatever_names_there_are(site: Site) -> None:
    names = {"a\r\nx-evil: 1": 1, "\u00e4": 2, "b" * 5000: 3, **{f"n{i}": i for i in range(100)}}
    answer = await call(site.app, CHAT, {**HELLO, **names, "absent": None})
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"].startswith("a%0D%0Ax-evil%3A 1, %C3%A4, bbb")
    assert len(answer.headers["x-ignored-fields"]) == 1024


async def test_a_misspelt_parameter_names_the_nearest_where_it_is_refused(make_site: SiteMaker) -> None:
    async with make_site(limits={"strict_fields": True}) as site:
        answer = await call(site.app, CHAT, {**HELLO, "temprature": 1})
        assert answer.json["error"]["message"] == "unknown parameter 'temprature'; did you mean 'temperature'?"
        for name in ("foo", "vllm_xargs", "kv_transfer_params", "cache_control"):
            answer = await call(site.app, CHAT, {**HELLO, name: 1})
            assert answer.json["error"]["message"] == f"unknown parameter {name!r}"


async def test_a_refused_stream_has_a_status_not_an_event(site: Site) -> None:
    answer = await call(site.app, CHAT, {**user("Hi" * 300), "stream": True})
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert "512 tokens, answer included; the prompt is too long: it has 619" in answer.json["error"]["message"]


async def test_harmless_and_neutral_parameters_are_accepted(site: Site) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "n": 1,
        "frequency_penalty": 0.0, "presence_penalty": 0, "response_format": {"type": "text"}, "logit_bias": {}, "audio": None,
        "parallel_tool_calls": True, "stop": None, "modalities": ["text"], "tools": None, "temperature": None,
    }  # fmt: skip
    assert (await call(site.app, CHAT, {**HELLO, **harmless})).status == 200


async def test_unknown_paths_and_methods_answer_in_their_dialect(site: Site) -> None:
    missing = await call(site.app, "/nothing")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    wrong = await call(site.app, CHAT)
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")
    cloud = await call(site.app, "/client/v4/accounts/a/ai/run/tiny")
    assert (cloud.status, cloud.json["errors"][0]["code"]) == (405, 5005)


async def test_a_body_over_the_limit_is_413(make_site: SiteMaker) -> None:
    async with make_site(limits={"max_body_mib": 0.001}) as site:
        declared = await call(site.app, CHAT, user("x" * 2000), content_length="2100")
        assert (declared.status, declared.json["error"]["code"]) == (413, "body_too_large")
        undeclared = await call(site.app, CHAT, user("x" * 2000))
        assert undeclared.status == 413
        cloud = await call(site.app, "/client/v4/accounts/a/ai/run/tiny", {"prompt": "x" * 2000})
        assert (cloud.status, cloud.json["errors"][0]["code"]) == (413, 3006)
        assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_a_compressed_body_is_refused_by_name(site: Site) -> None:
    answer = await call(site.app, CHAT, body=b"\x1f\x8b", content_encoding="gzip")
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
    assert "content-encoding" in answer.json["error"]["message"]
    assert (await call(site.app, CHAT, HELLO, content_encoding="identity")).status == 200


@pytest.mark.process
async def test_a_template_that_refuses_is_a_400(make_site: SiteMaker, model_directory: Any) -> None:
    (model_directory / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('the first message must come from the user') }}{% endif %}x"
    )
    async with make_site() as site:
        answer = await call(site.app, CHAT, {"model": "tiny", "messages": [{"role": "assistant", "content": "a"}]})
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert "the first message must come from the user" in answer.json["error"]["message"]
        assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_an_unforeseen_failure_is_a_500_in_the_dialect(site: Site) -> None:
    site.engine.script = [RuntimeError("surprise")]
    for stream in (False, True):
        answer = await call(site.app, CHAT, {**HELLO, "stream": stream})
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        assert "surprise" not in answer.json["error"]["message"]
